"""What a bench is held against: the physical limit of the declared wiring, and the cost model's prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterrun.config.schema import ClusterConfig


@dataclass(frozen=True)
class Expected:
    """For a cluster as declared. Every answer is None where nothing is known.

    Ranks are numbered node by node, ``per_node`` on each.
    """

    cluster: ClusterConfig

    def limit(self, ranks: Sequence[int]) -> float | None:
        """The busbw that the declared wires allow, bytes per second: a ring crosses each node's edge once each way."""
        nodes = {rank // self.cluster.nproc_per_node for rank in ranks}
        wiring = self.cluster.interconnect
        if len(nodes) < 2 or wiring.nic_gbit_per_s is None:
            return None
        return (wiring.nics_per_node or 1) * wiring.nic_gbit_per_s * 1e9 / 8

    def seconds(self, collective: str, ranks: Sequence[int], size: int) -> float | None:
        """The predicted time."""
        return None
