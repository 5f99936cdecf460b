"""MLflow: mirrors of studies and runs, and MLflow's own server."""
