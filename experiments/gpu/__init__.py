"""Predicted against measured on one card: a campaign of configurations in order of value. See README.md."""
