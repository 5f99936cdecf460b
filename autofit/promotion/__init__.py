"""A trial becomes a full training run."""
