"""The environment of the workers, each variable with its reason. Pure: from the configuration, the topology and what is
already set.

What a user set always wins: first ``cluster.env``, then the environment of the submission or the job, then what is
derived here. Some values only a node can know; the plan lists those with the rule, and the agent settles them.
Names and defaults are those of NCCL's "Environment Variables" page (2.30) and torch's ProcessGroupNCCL.hpp (2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from clusterrun.config.schema import Accelerator, InterNode, NumaBinding, RunConfig

#: Above so many ranks NCCL's INFO lines (tens of KiB per rank) load the shared file system for little news.
INFO_RANKS_MAX = 512
FLIGHT_RECORDS = 2000  # collectives remembered per rank for the report after a time-out
#: What sysfs calls the link layer of each kind of network. EFA devices say "Unspecified" (Linux's efa driver).
LAYERS = {InterNode.infiniband: "InfiniBand", InterNode.roce: "Ethernet", InterNode.efa: "Unspecified"}


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
