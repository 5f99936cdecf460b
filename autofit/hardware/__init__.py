"""The machine: its devices, and what its host costs the simulated clock."""
