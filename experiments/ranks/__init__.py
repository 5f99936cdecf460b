"""Studies of several cards."""
