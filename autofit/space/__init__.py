"""The search space: all candidates of a recipe that keep its effective batch."""
