"""The search for the next trial; Optuna holds the record."""
