"""The machine: its devices, and the host costs of the simulated clock."""
