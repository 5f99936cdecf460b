"""What torch and other libraries are made to believe while a simulated card is active."""
