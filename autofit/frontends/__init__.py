"""Files of other tools: which tool a file is of, and its batch by that tool's own arithmetic. Loads no torch."""
