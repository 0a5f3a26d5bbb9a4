"""What is asked of the scheduler, where it does not stand in the configuration word for word."""

from __future__ import annotations

from clusterrun.config.schema import GpuRequest, RunConfig


def requested_gpus(config: RunConfig) -> int:
    """GPUs per node asked of the scheduler: one per worker, none where the cluster has none."""
    cluster = config.cluster
    if cluster.gpus_per_node == 0 or cluster.slurm.gpu_request is GpuRequest.none:
        return 0
    return min(cluster.nproc_per_node, cluster.gpus_per_node)
