"""The demo on real input: a small model with real weights, a task whose answers can be checked, a recipe."""
