"""A recipe: the YAML that TRL takes, and what follows from it."""
