"""Rollout engines: how they schedule sequences, what their kernels take, and the memory that they hold. No torch."""
