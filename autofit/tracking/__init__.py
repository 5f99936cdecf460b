"""MLflow: the mirror of a study and of a run, and MLflow's own server."""
