"""What to try next; Optuna is the record."""
