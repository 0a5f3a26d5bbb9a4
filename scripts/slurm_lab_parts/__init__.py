"""What scripts/slurm_lab is made of."""
