"""Jobs on a cluster: what is asked of Slurm, how a job is submitted, and what has become of it. No torch here."""
