"""Trainers of other tools, run whole on the simulated card, against what autofit says of their files."""
