"""What is asked of the scheduler, where it does not stand in the configuration word for word."""

from __future__ import annotations

from clusterrun.config.schema import GpuRequest, RunConfig
from clusterrun.config.units import time_limit_minutes


def requested_gpus(config: RunConfig) -> int:
    """GPUs per node asked of the scheduler: one per worker, none where the cluster has none."""
    cluster = config.cluster
    if cluster.gpus_per_node == 0 or cluster.slurm.gpu_request is GpuRequest.none:
        return 0
    return min(cluster.nproc_per_node, cluster.gpus_per_node)


def signal_lead_s(config: RunConfig) -> int:
    """Seconds before the time limit at which the run is told to save, at most a quarter of the limit.

    Slurm sends it up to 60 s earlier than asked, so a fixed lead would eat a short job whole.
    """
    limit = config.cluster.time_limit
    if limit is None:
        return config.cluster.signal_lead_s
    return min(config.cluster.signal_lead_s, time_limit_minutes(limit) * 60 // 4)
