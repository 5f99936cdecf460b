"""Memory and time of any configuration as formulas, fitted to a few short traces."""
