"""One trace stands for many configurations."""
