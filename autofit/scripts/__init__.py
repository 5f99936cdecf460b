"""A training script of one's own on a simulated card, with stand-ins for what is not on this machine."""
