"""A recipe: the YAML that TRL takes, and the quantities derived from it."""
