"""A run of a few layers, expanded to the run of all layers."""
