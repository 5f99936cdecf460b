"""Search spaces: one YAML file each, readable by anyone who knows TRL's options."""
