"""The candidates of a recipe that keep its effective batch."""
