"""Files of other tools: the tool of a file, and its batch by that tool's own arithmetic. Free of torch."""
