"""What a simulated card says of every candidate, before the first probe."""
