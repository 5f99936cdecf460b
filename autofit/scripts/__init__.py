"""A training script of one's own on a simulated card, with stand-ins for missing models, data and packages."""
