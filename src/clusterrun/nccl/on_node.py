"""What each node settles for itself: the NICs that NCCL may use, and whether workers are bound to CPUs.

Pure: from the configuration, the topology that preflight detected there, and what is set already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterrun.config.schema import Accelerator, NumaBinding, RunConfig
from clusterrun.nccl.settings import LAYERS, Setting, Source
from clusterrun.topology.grammar import expand
from clusterrun.topology.model import LinkKind, Nic, Topology

_RATE_TOLERANCE = 0.99


def on_node(config: RunConfig, found: Topology | None, environ: Mapping[str, str]) -> list[Setting]:
    """NCCL_IB_HCA and NCCL_NET_GDR_LEVEL from what this node detected. A variable that is set already is left so.

    ``found`` is None when preflight could not read the topology: then both are left to NCCL.
    """
    cluster = config.cluster
    layer = LAYERS.get(cluster.interconnect.inter_node)
    if cluster.accelerator is not Accelerator.cuda or cluster.nodes == 1 or layer in (None, "Unspecified"):
        return []
    if found is None:
        reason = "left to NCCL: this node's NICs could not be read"
        derived = [Setting("NCCL_IB_HCA", None, reason), Setting("NCCL_NET_GDR_LEVEL", None, reason)]
    else:
        nics = chosen_nics(found, str(layer), cluster.interconnect.nic_gbit_per_s, cluster.interconnect.nics_per_node)
        derived = [_hca(found, nics), _gdr(found, nics)]
    user = Source.user.value
    return [Setting(s.name, environ[s.name], "already set", user) if s.name in environ else s for s in derived]


def chosen_nics(found: Topology, layer: str, rate: float | None, wanted: int | None) -> list[Nic]:
    """The NICs to train over: active, of the declared layer and rate; of more than declared, those near a GPU."""
    fit = [
        nic
        for nic in found.nics
        if nic.device
        and nic.link_layer == layer
        and nic.state == "ACTIVE"
        and (rate is None or nic.rate_gbit_s is None or nic.rate_gbit_s >= rate * _RATE_TOLERANCE)
    ]
    if wanted is not None and len(fit) > wanted:
        near = [nic for nic in fit if any(link and link.kind >= LinkKind.PXB for link in nic.links)]
        if len(near) == wanted:
            return near
    return fit


def _hca(found: Topology, nics: Sequence[Nic]) -> Setting:
    name = "NCCL_IB_HCA"
    if not nics:
        return Setting(name, None, "left to NCCL: no active NIC of the declared kind was found here")
    left_out = [nic.device or nic.name for nic in found.nics if nic not in nics]
    if not left_out:
        return Setting(name, None, f"left to NCCL: all {len(nics)} RDMA devices are of the declared kind and active")
    value = "=" + ",".join(nic.device or "" for nic in nics)
    return Setting(name, value, f"not of the declared kind, rate or place, or not active: {', '.join(left_out)}")


def _gdr(found: Topology, nics: Sequence[Nic]) -> Setting:
    name = "NCCL_NET_GDR_LEVEL"
    links = [link for nic in nics for link in nic.links]
    if not links or None in links:
        return Setting(name, None, "left to NCCL: the paths from GPUs to NICs are not known")
    best = max(link.kind for link in links if link)
    if best >= LinkKind.PXB:
        return Setting(name, None, "left to NCCL: its limit PXB covers the GPUs that have a NIC on their PCIe switch")
    if best is LinkKind.PHB:
        return Setting(name, "PHB", "no GPU has a NIC nearer than its host bridge: with PXB none would use GPUDirect")
    return Setting(name, None, f"left to NCCL: no NIC is nearer to a GPU than {best.name}, too far for GPUDirect")


def numa_mode(
    config: RunConfig, *, torch_can: bool, numactl: bool, near_cpus: Sequence[str | None], allowed: set[int]
) -> tuple[str | None, str]:
    """The value for torchrun's --numa-binding on this node, or None, and why.

    ``near_cpus``: CPU list near each GPU ("0-31,64-95"), None where not known; ``allowed``: the step's own CPUs.
    torchrun fails every worker when a GPU has none of its CPUs in the step, so that is looked at before.
    """
    wanted = config.cluster.numa_binding
    if config.cluster.accelerator is not Accelerator.cuda or wanted is NumaBinding.none:
        return None, "not wanted"
    if not torch_can:
        return None, "this torch has no --numa-binding"
    if not numactl:
        return None, "numactl is not installed on this node, and torchrun needs it"
    if not near_cpus or any(cpus is None for cpus in near_cpus):
        return None, "the CPUs near the GPUs are not known"
    near = [frozenset(expand(cpus or "")) for cpus in near_cpus]
    if len(set(near)) == 1:
        return None, "all GPUs are near the same CPUs"
    if not all(cpus & allowed for cpus in near):
        return None, "the step was not given CPUs near every GPU"
    return ("node" if wanted is NumaBinding.auto else wanted.name), "each worker near its GPU"
