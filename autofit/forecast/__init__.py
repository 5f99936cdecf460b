"""The forecast: predictions for every candidate from a simulated card, before the first probe."""
