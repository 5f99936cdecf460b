"""Rollout engines: the scheduling of sequences, the seconds of their kernels, and their memory. Free of torch."""
