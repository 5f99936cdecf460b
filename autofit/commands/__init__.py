"""One module a command, or a pair of them: with cli.py the only ones that print. Heavy imports stay in functions."""
