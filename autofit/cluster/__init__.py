"""Jobs on a cluster: requests to Slurm, submission of a job, and its state. Free of torch."""
