"""Promotion: a trial becomes a full training run."""
