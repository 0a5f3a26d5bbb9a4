"""The environment of the workers, each variable with its reason. Pure: from the configuration, the topology and what is
already set.

What a user set always wins: first ``cluster.env``, then the environment of the submission or the job, then what is
derived here. Some values only a node can know; the plan lists those with the rule, and the agent settles them.
Names and defaults are those of NCCL's "Environment Variables" page (2.30) and torch's ProcessGroupNCCL.hpp (2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from clusterrun.config.schema import Accelerator, InterNode, NumaBinding, RunConfig
from clusterrun.topology.grammar import expand
from clusterrun.topology.model import LinkKind, Nic, Topology

#: Above so many ranks NCCL's INFO lines (tens of KiB per rank) load the shared file system for little news.
INFO_RANKS_MAX = 512
FLIGHT_RECORDS = 2000  # collectives remembered per rank for the report after a time-out
#: What sysfs calls the link layer of each kind of network. EFA devices say "Unspecified" (Linux's efa driver).
LAYERS = {InterNode.infiniband: "InfiniBand", InterNode.roce: "Ethernet", InterNode.efa: "Unspecified"}
_RATE_TOLERANCE = 0.99


class Source(Enum):
    """Who decided on a value."""

    derived = "derived"
    config = "cluster.env"
    user = "your environment"
    node = "each node"  # settled there; the plan knows the rule only


@dataclass(frozen=True)
class Setting:
    """One variable. ``value`` None: decided on each node, or left alone; ``reason`` says which."""

    name: str
    value: str | None
    reason: str
    source: str = Source.derived.value


def planned(config: RunConfig, environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """All variables that clusterrun decides on, in the order they are shown; ``environ`` is the user's own."""
    derived = [_threads(config), *_sockets(config)]
    if config.cluster.accelerator is Accelerator.cuda:
        derived += [*_fabric(config), *_logging(config), *_watchdog()]
    derived.append(_numa(config))
    cluster_env = config.cluster.env
    found = []
    for one in derived:
        if one.name in cluster_env:
            found.append(Setting(one.name, cluster_env[one.name], "as configured", Source.config.value))
        elif one.name in environ:
            found.append(Setting(one.name, environ[one.name], "already set, and left so", Source.user.value))
        else:
            found.append(one)
    known = {one.name for one in found}
    found += [Setting(k, v, "as configured", Source.config.value) for k, v in cluster_env.items() if k not in known]
    return tuple(found)


def step_environment(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """What is added to the environment of every step: cluster.env, and what is derived unless it is set already."""
    kinds = (Source.derived.value, Source.config.value)
    return {s.name: s.value for s in planned(config, environ) if s.value is not None and s.source in kinds}


def _threads(config: RunConfig) -> Setting:
    reason = "cluster.cpus_per_proc; torchrun would set 1, a bare start all cores"
    return Setting("OMP_NUM_THREADS", str(config.cluster.cpus_per_proc), reason)


def _sockets(config: RunConfig) -> list[Setting]:
    """The agent sets the node's part: the interface that holds the address of the rendezvous."""
    given = config.cluster.interconnect.interface
    if given:
        reason, source = "cluster.interconnect.interface", Source.derived.value
    else:
        reason, source = (
            "the interface on the way to the first node, so that no virtual one is taken",
            Source.node.value,
        )
    gloo = Setting("GLOO_SOCKET_IFNAME", given, reason, source)
    if config.cluster.accelerator is not Accelerator.cuda:
        return [gloo]
    return [Setting("NCCL_SOCKET_IFNAME", f"={given}" if given else None, reason, source), gloo]


def _fabric(config: RunConfig) -> list[Setting]:
    order = Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "GPUs are numbered as nvidia-smi and preflight number them")
    algo = Setting("NCCL_ALGO", None, "left alone: no reason known to overrule NCCL's own choice by size and topology")
    if config.cluster.interconnect.inter_node not in LAYERS or config.cluster.nodes == 1:
        return [order, algo]
    layer, node = LAYERS[config.cluster.interconnect.inter_node], Source.node.value
    wiring = config.cluster.interconnect
    rate = f" at {wiring.nic_gbit_per_s:g} Gbit/s" if wiring.nic_gbit_per_s else ""
    hca = f"only where a node has RDMA devices that are not active {layer} ports{rate}: those are left out"
    gdr = "PHB only where no GPU has a NIC behind its own PCIe switch; else NCCL's own limit (PXB) stands"
    if wiring.inter_node is InterNode.efa:  # reached through libfabric, which NCCL_IB_HCA does not touch
        return [order, algo]
    return [order, Setting("NCCL_IB_HCA", None, hca, node), Setting("NCCL_NET_GDR_LEVEL", None, gdr, node), algo]


def _logging(config: RunConfig) -> list[Setting]:
    if config.world_size <= INFO_RANKS_MAX:
        level, why = "INFO", "says which transport, NICs and channels are used; read afterwards for silent fall-backs"
    else:
        level, why = "WARN", f"more than {INFO_RANKS_MAX} ranks: INFO would write too much to shared storage"
    file = "attempts/<n>/logs/<node>.<rank>.nccl: one file per rank, apart from your program's output"
    return [Setting("NCCL_DEBUG", level, why), Setting("NCCL_DEBUG_FILE", None, file, Source.node.value)]


def _watchdog() -> list[Setting]:
    dump = "attempts/<n>/logs/<node>.flight_<rank>: which collective each rank hung in; its name takes torch's rank"
    return [
        Setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "an NCCL error or time-out ends the rank instead of hanging"),
        Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "after a time-out the flight recorder is written out"),
        Setting("TORCH_NCCL_TRACE_BUFFER_SIZE", str(FLIGHT_RECORDS), "collectives that the flight recorder remembers"),
        Setting("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", None, dump, Source.node.value),
    ]


def _numa(config: RunConfig) -> Setting:
    name, wanted = "--numa-binding", config.cluster.numa_binding
    if config.cluster.accelerator is not Accelerator.cuda or wanted is NumaBinding.none:
        return Setting(
            name, None, "workers are not bound: no GPUs to be near" if wanted is not NumaBinding.none else "off"
        )
    mode = "node" if wanted is NumaBinding.auto else wanted.name
    return Setting(
        name, None, f"torchrun binds each worker to the CPUs near its GPU ({mode}) where {NUMA_RULE}", "each node"
    )


NUMA_RULE = "torch and numactl can, there are several NUMA nodes, and the step has CPUs near every GPU"


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
