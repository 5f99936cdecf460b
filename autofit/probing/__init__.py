"""Probes: one candidate on one device, in a process of its own."""
