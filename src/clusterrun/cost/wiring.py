"""The wiring of a job as the cost model sees it: how fast a ring runs in a node, and what leaves a node."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.config.schema import Accelerator, ClusterConfig, Executor, InterNode, IntraNode
from clusterrun.cost.catalog import PCIE_X16_GB_PER_S, Catalog, CpuParameters, GpuFigures, ModelParameters


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
        network: its kind (infiniband, roce, efa, efa_v2, ethernet), for the latency of a hop.
        gloo: CPUs, and Gloo's ring over TCP instead of NCCL.
        algorithms: those that may be used (ring, tree, nvls, nvls_tree); None: NCCL chooses.
    """

    nodes: int
    per_node: int
    intra_gb_per_s: float
    intra_what: str
    nvls_gb_per_s: float | None = None
    inter_gb_per_s: float = float("inf")
    inter_what: str = ""
    network: str = "infiniband"
    gloo: bool = False
    algorithms: tuple[str, ...] | None = None

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
        return _of_cpus(cluster, catalog.parameters().cpu)
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
    newer = (
        wires.inter_node is InterNode.efa and (gpu.pcie_generation or 5) >= 5
    )  # hosts of PCIe 5.0 came with its next
    return Wiring(
        nodes=cluster.nodes,
        per_node=cluster.nproc_per_node,
        intra_gb_per_s=intra,
        intra_what=what,
        nvls_gb_per_s=_nvls(gpu, wires.intra_node, cluster.nproc_per_node),
        inter_gb_per_s=rate,
        inter_what=f"{ports} x {wires.nic_gbit_per_s:g} Gbit/s {wires.inter_node.value} per node",
        network="efa_v2" if newer else wires.inter_node.value,
    )


def _of_cpus(cluster: ClusterConfig, cpu: CpuParameters) -> Wiring | Unknown:
    """Gloo's ring. It uses one interface of a node, whatever its kind, with TCP."""
    wires, ranks = cluster.interconnect, cluster.nodes * cluster.nproc_per_node
    here = cluster.executor is Executor.local or (cluster.local_paths_shared and wires.nic_gbit_per_s is None)
    if cluster.nodes == 1 or here:  # "nodes" that are one machine
        return Wiring(1, ranks, cpu.loopback_gb_per_s, "loopback of one machine", gloo=True)
    if wires.nic_gbit_per_s is None:
        return Unknown("cluster.interconnect.nic_gbit_per_s is not given")
    return Wiring(
        nodes=cluster.nodes,
        per_node=cluster.nproc_per_node,
        intra_gb_per_s=cpu.loopback_gb_per_s if cluster.nproc_per_node > 1 else float("inf"),
        intra_what="loopback of a node",
        inter_gb_per_s=min(wires.nic_gbit_per_s / 8 * cpu.link_share, cpu.loopback_gb_per_s),
        inter_what=f"{wires.nic_gbit_per_s:g} Gbit/s over TCP",
        network="ethernet",
        gloo=True,
    )


def _in_node(
    gpu: GpuFigures, wiring: IntraNode, nvlinks: int | None, per_node: int, parameters: ModelParameters
) -> tuple[float, str]:
    """Bus bandwidth of a ring inside a node, and the link that decides it: as published for this wiring, else a share
    of the wires. On a switch it is the same for any number of GPUs; elsewhere only the same number counts."""
    if per_node == 1:
        return float("inf"), "one rank per node"
    link = gpu.link
    mesh = wiring in (IntraNode.nvlink_mesh, IntraNode.nvlink_hybrid)
    pair = wiring is IntraNode.nvlink_pairs and per_node == 2
    if link is not None and (wiring is IntraNode.nvswitch or mesh or pair):
        kind = link.kind.replace("nvlink", "NVLink")
        links = link.links
        if (mesh or pair) and nvlinks:  # what leads to the GPUs that take part
            links = min(links, nvlinks * (per_node - 1))
        what = f"{links} {kind}s to the other GPU" if pair else f"{links} {kind}s per GPU"
        published = _published(gpu, wiring, "ring", per_node) if links == link.links else None
        return published or links * link.gb_per_s * parameters.link_share, what
    pcie = f"PCIe {gpu.pcie_generation or 4}.0 x16"
    wire = PCIE_X16_GB_PER_S[gpu.pcie_generation or 4]
    crossed = IntraNode.nvlink_pairs if wiring is IntraNode.nvlink_pairs else IntraNode.pcie
    return _published(gpu, crossed, "ring", per_node) or wire * parameters.pcie_share, pcie


def _published(gpu: GpuFigures, wiring: IntraNode, algorithm: str, gpus: int) -> float | None:
    """Bus bandwidth, GB/s."""
    alike = [one for one in gpu.all_reduce if one.wiring == wiring.value and one.algorithm == algorithm]
    if wiring is not IntraNode.nvswitch:
        alike = [one for one in alike if one.gpus == gpus]
    return min(alike, key=lambda one: abs(one.gpus - gpus)).busbw_gb_per_s if alike else None


def _nvls(gpu: GpuFigures, wiring: IntraNode, per_node: int) -> float | None:
    """Size over time of an all-reduce by the switch. From five GPUs on it beats a ring (NCCL's own choice on H200)."""
    if not gpu.nvls or wiring is not IntraNode.nvswitch or per_node <= 4:
        return None
    one = next((one for one in gpu.all_reduce if one.algorithm == "nvls"), None)
    return None if one is None else one.busbw_gb_per_s * one.gpus / (2 * (one.gpus - 1))
