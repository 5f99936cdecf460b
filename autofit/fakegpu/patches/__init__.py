"""Changes to torch and other libraries while a simulated card is active."""
