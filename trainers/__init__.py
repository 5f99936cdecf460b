"""One module per trainer: builds the TRL trainer of a recipe and names its phases. A plug-in, found by name."""
