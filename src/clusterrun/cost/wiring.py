"""The wiring of a job as the cost model sees it: how fast a ring runs in a node, and what leaves a node."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.config.schema import Accelerator, ClusterConfig, IntraNode
from clusterrun.cost.catalog import PCIE_X16_GB_PER_S, Catalog, GpuFigures, ModelParameters


@dataclass(frozen=True)
class Wiring:
    """Figures of a job's ranks. GB/s are decimal, one way, as a large all-reduce reaches them.

    Attributes:
        nodes, per_node: how many nodes, and ranks on each.
        intra_gb_per_s: bus bandwidth of a ring inside one node; infinite with one rank per node.
        intra_what: the link that decides it, in words.
        nvls_gb_per_s: algorithm bandwidth (size over time) when NVSwitch adds up; None without NVLS.
        inter_gb_per_s: what one node sends and, at the same time, receives; infinite with one node.
        inter_what: the network, in words.
        network: its kind (infiniband, roce, efa, ethernet), for the latency of a hop.
    """

    nodes: int
    per_node: int
    intra_gb_per_s: float
    intra_what: str
    nvls_gb_per_s: float | None = None
    inter_gb_per_s: float = float("inf")
    inter_what: str = ""
    network: str = "infiniband"

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Unknown:
    """Why nothing can be predicted, and what to declare."""

    why: str


def declared(cluster: ClusterConfig, catalog: Catalog) -> Wiring | Unknown:
    """The wiring that a cluster declares, with the catalogue's figures."""
    if cluster.accelerator is not Accelerator.cuda:
        return Unknown("the catalogue has no CPUs")
    if cluster.gpu_model is None:
        return Unknown("cluster.gpu_model is not given")
    found = catalog.find_gpu(cluster.gpu_model)
    if found is None:
        return Unknown(f"cluster.gpu_model={cluster.gpu_model}: not in the catalogue; add hardware/gpu/NAME.yaml")
    wires, gpu = cluster.interconnect, found[1]
    intra, what = _in_node(gpu, wires.intra_node, wires.nvlinks_per_pair, cluster.nproc_per_node, catalog.parameters())
    if cluster.nodes == 1:
        return Wiring(1, cluster.nproc_per_node, intra, what, _nvls(gpu, wires.intra_node, cluster.nproc_per_node))
    if wires.nic_gbit_per_s is None:
        return Unknown("cluster.interconnect.nic_gbit_per_s is not given")
    network = catalog.find_network(wires.inter_node.value, wires.nic_gbit_per_s)
    if network is None:
        return Unknown(f"cluster.interconnect.inter_node={wires.inter_node.value}: no such network in the catalogue")
    ports = wires.nics_per_node or 1
    rate = ports * wires.nic_gbit_per_s / 8 * network[1].achieved_share
    return Wiring(
        nodes=cluster.nodes,
        per_node=cluster.nproc_per_node,
        intra_gb_per_s=intra,
        intra_what=what,
        nvls_gb_per_s=_nvls(gpu, wires.intra_node, cluster.nproc_per_node),
        inter_gb_per_s=rate,
        inter_what=f"{ports} x {wires.nic_gbit_per_s:g} Gbit/s {wires.inter_node.value} per node",
        network=wires.inter_node.value,
    )


def _in_node(
    gpu: GpuFigures, wiring: IntraNode, nvlinks: int | None, per_node: int, parameters: ModelParameters
) -> tuple[float, str]:
    """Bus bandwidth of a ring inside a node, and the link that decides it."""
    if per_node == 1:
        return float("inf"), "one rank per node"
    link = gpu.link
    if link is not None and wiring is IntraNode.nvlink_pairs and per_node == 2:
        links = nvlinks or link.links
        return links * link.gb_per_s * parameters.link_share, f"{links} NVLinks to the other GPU"
    if link is not None and wiring not in (IntraNode.pcie, IntraNode.none, IntraNode.nvlink_pairs):
        published = [v for k, v in gpu.all_reduce_busbw_gb_per_s.items() if k.startswith("8 GPUs") and "NVLS" not in k]
        rate = published[0] if published else link.total_gb_per_s * parameters.link_share
        return rate, f"{link.links} {link.kind.replace('nvlink', 'NVLink')}s per GPU"
    wire = PCIE_X16_GB_PER_S[gpu.pcie_generation or 4]
    return wire * parameters.pcie_share, f"PCIe {gpu.pcie_generation or 4}.0 x16"


def _nvls(gpu: GpuFigures, wiring: IntraNode, per_node: int) -> float | None:
    """Size over time of an all-reduce by the switch. From five GPUs on it beats a ring (NCCL's own choice on H200)."""
    if not gpu.nvls or wiring is not IntraNode.nvswitch or per_node <= 4:
        return None
    published = [v for k, v in gpu.all_reduce_busbw_gb_per_s.items() if "NVLS" in k]
    return published[0] * 8 / 14 if published else None  # bus bandwidth of eight ranks is 14/8 of size over time
