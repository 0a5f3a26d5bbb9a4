"""NCCL: the environment it is given, variables that hurt it, and what its own logs say it did."""
