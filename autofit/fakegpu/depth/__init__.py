"""A few layers stand for many."""
