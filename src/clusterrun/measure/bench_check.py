"""Whether the settings of a bench name things there are."""

from __future__ import annotations

from clusterrun.config.schema import Action, RunConfig
from clusterrun.errors import ConfigError, choices, nearest
from clusterrun.measure import collectives
from clusterrun.measure.groups import BENCH_GROUPS, bench_phases


def check_bench(config: RunConfig) -> None:
    """Whether ``bench`` names things there are. Raises ConfigError."""
    bench = config.bench
    collectives.names(bench.collective)
    if bench.sizes:
        collectives.sizes(bench.sizes)
    for name in bench.groups:
        if name not in BENCH_GROUPS:
            raise ConfigError(
                f"bench.groups={name}: no such group.{nearest(name, BENCH_GROUPS)} Known: {choices(BENCH_GROUPS)}"
            )
    if config.action is not Action.bench:
        return
    cluster = config.cluster
    if bench.tool == "torch" and not bench_phases(bench.groups, cluster.nodes, cluster.nproc_per_node):
        raise ConfigError(
            f"bench.groups={list(bench.groups)}: nothing to measure with {cluster.nodes} nodes of "
            f"{cluster.nproc_per_node} workers; give more, or other groups ({choices(BENCH_GROUPS)})"
        )
    if bench.tool != "torch" and bench.collective == collectives.ALL:
        raise ConfigError("bench.collective=all: with bench.tool=nccl-tests one collective at a time")
