"""What a bench is held against: the physical limit of the declared wiring, and the cost model's prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from clusterrun.config.schema import ClusterConfig, IntraNode
from clusterrun.config.user_dirs import user_config_dirs
from clusterrun.cost.catalog import PCIE_X16_GB_PER_S, Catalog, GpuFigures
from clusterrun.cost.collectives import COLLECTIVES
from clusterrun.cost.wiring import Unknown, declared


@dataclass(frozen=True)
class Expected:
    """For a cluster as declared. Every answer is None where nothing is known.

    Ranks are numbered node by node, ``per_node`` on each.
    """

    cluster: ClusterConfig

    def limit(self, ranks: Sequence[int]) -> float | None:
        """The busbw of a ring that the declared wires allow, bytes per second: out of a node its NICs, in a node all
        NVLinks of a GPU (those to one peer, where they lead to one only), else 16 lanes of PCIe."""
        nodes = {rank // self.cluster.nproc_per_node for rank in ranks}
        wiring = self.cluster.interconnect
        if len(nodes) > 1:
            if wiring.nic_gbit_per_s is None:
                return None
            return (wiring.nics_per_node or 1) * wiring.nic_gbit_per_s * 1e9 / 8
        gpu = self._gpu
        if gpu is None:
            return None
        if gpu.link is not None and wiring.intra_node is IntraNode.nvswitch:
            return gpu.link.total_gb_per_s * 1e9
        if gpu.link is not None and wiring.nvlinks_per_pair and len(ranks) == 2:
            return wiring.nvlinks_per_pair * gpu.link.gb_per_s * 1e9
        if gpu.link is not None and wiring.intra_node is IntraNode.nvlink_mesh:
            return gpu.link.total_gb_per_s * 1e9
        wire = PCIE_X16_GB_PER_S.get(gpu.pcie_generation or 0)
        return wire * 1e9 if wire is not None and wiring.intra_node is not IntraNode.none else None

    @cached_property
    def _gpu(self) -> GpuFigures | None:
        model = self.cluster.gpu_model
        found = self._catalog.find_gpu(model) if model else None
        return found[1] if found else None

    def seconds(self, collective: str, ranks: Sequence[int], size: int) -> float | None:
        """The time that the cost model predicts for NCCL; None for CPUs and where something is not declared."""
        counts = Counter(rank // self.cluster.nproc_per_node for rank in ranks)
        if len(set(counts.values())) != 1:
            return None
        nodes, per_node = len(counts), counts.most_common(1)[0][1]
        wires = self.cluster.interconnect
        if wires.nics_per_node is not None:  # a GPU takes the NICs that are its own
            share = max(1, wires.nics_per_node * per_node // self.cluster.nproc_per_node)
            wires = replace(wires, nics_per_node=share)
        part = replace(self.cluster, nodes=nodes, nproc_per_node=per_node, interconnect=wires)
        wiring = declared(part, self._catalog)
        if isinstance(wiring, Unknown):
            return None
        return COLLECTIVES[collective](size, wiring, self._catalog.parameters()).seconds

    @cached_property
    def _catalog(self) -> Catalog:
        return Catalog(user_config_dirs())
