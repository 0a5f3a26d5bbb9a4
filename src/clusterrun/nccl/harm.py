"""Variables in the environment that make communication slow, or stop it: each with what it costs and what to do.

Two kinds of judgement. ``harms`` needs the variables and the declared wiring only, so the plan makes it too.
``stale_names`` needs what a node has: interfaces and RDMA devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from clusterrun.config.schema import Accelerator, ClusterConfig, InterNode, IntraNode

NVLINK = (IntraNode.nvswitch, IntraNode.nvlink_mesh, IntraNode.nvlink_hybrid, IntraNode.nvlink_pairs)
RDMA = (InterNode.infiniband, InterNode.roce)
_FABRIC = (*RDMA, InterNode.efa)
_ON = ("1", "true", "yes", "on")
#: Prefixes of the variables that are looked at; a node reports these and no others.
LOOKED_AT = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG")


@dataclass(frozen=True)
class Harm:
    """One variable that hurts."""

    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.why}"


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that these checks look at."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(LOOKED_AT)}


def harms(environ: Mapping[str, str], cluster: ClusterConfig) -> list[Harm]:
    """What hurts whatever the node has, given the declared wiring. NCCL's own are judged on GPU clusters only."""
    found = []
    for names, bad in (_NCCL if cluster.accelerator is Accelerator.cuda else ()) + _ANY:
        for name in names:
            value = environ.get(name)
            why = bad(value.strip(), cluster) if value is not None and value.strip() else None
            if value is not None and why:
                found.append(Harm(name, value, why))
    return found


def stale_names(
    environ: Mapping[str, str], interfaces: Sequence[str] | None, devices: Sequence[str] | None
) -> list[Harm]:
    """Variables that name interfaces or RDMA devices, none of which this node has. None: not known, not judged."""
    found = []
    for name, there, kind in (
        ("NCCL_SOCKET_IFNAME", interfaces, "network interface"),
        ("GLOO_SOCKET_IFNAME", interfaces, "network interface"),
        ("NCCL_IB_HCA", devices, "RDMA device"),
    ):
        value = environ.get(name)
        if not value or there is None:
            continue
        if name.startswith("GLOO"):
            missing = [one for one in value.split(",") if one.strip() not in there]
            if missing:  # Gloo opens every one of them
                found.append(Harm(name, value, f"no {kind} {', '.join(missing)} here; there are: {_listed(there)}"))
        elif not selected(value, there):
            found.append(Harm(name, value, f"selects no {kind} of this node; there are: {_listed(there)}"))
    return found


def selected(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a list of NCCL's selects: prefixes, or whole names after "=", the rest of them after "^"."""
    body = pattern.strip()
    inverted = body.startswith("^")
    body = body[1:] if inverted else body
    exact = body.startswith("=")
    body = body[1:] if exact else body
    wanted = [part.strip().partition(":")[0] for part in body.split(",") if part.strip()]  # without the port

    def fits(name: str) -> bool:
        return any(name == one if exact else name.startswith(one) for one in wanted)

    return [name for name in names if fits(name) != inverted]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _on(value: str) -> bool:
    return value.lower() in _ON


Bad = Callable[[str, ClusterConfig], str | None]


def _p2p_disable(value: str, c: ClusterConfig) -> str | None:
    if not _on(value) or c.nproc_per_node < 2:
        return None
    if c.interconnect.intra_node in NVLINK:
        return "NVLink is not used at all: GPUs of a node exchange data through host memory"
    return "GPUs of a node exchange data through host memory" if c.interconnect.intra_node is IntraNode.pcie else None


def _p2p_level(value: str, c: ClusterConfig) -> str | None:
    return _p2p_disable("1", c) if value.upper() in ("LOC", "0") else None


def _shm_disable(value: str, c: ClusterConfig) -> str | None:
    if _on(value) and c.nproc_per_node > 1 and c.interconnect.intra_node not in NVLINK:
        return "GPUs without peer-to-peer then talk over the network card, inside one node"
    return None


def _ib_disable(value: str, c: ClusterConfig) -> str | None:
    if _on(value) and c.nodes > 1 and c.interconnect.inter_node in RDMA:
        return f"{c.interconnect.inter_node.value} is declared, and TCP sockets will be used instead"
    return None


def _net(value: str, c: ClusterConfig) -> str | None:
    if value.lower() == "socket" and c.nodes > 1 and c.interconnect.inter_node in _FABRIC:
        return f"{c.interconnect.inter_node.value} is declared, and TCP sockets are forced"
    return None


def _gdr_level(value: str, c: ClusterConfig) -> str | None:
    if value.upper() in ("LOC", "0") and c.nodes > 1 and c.interconnect.inter_node in RDMA:
        return "GPUDirect RDMA is off: what goes between nodes is copied through host memory"
    return None


def _forced(value: str, c: ClusterConfig) -> str | None:
    return "forced for all sizes; NCCL's tuner chooses by size and topology. Fine for a measurement"


def _nvls(value: str, c: ClusterConfig) -> str | None:
    if value == "0" and c.interconnect.intra_node is IntraNode.nvswitch and has_nvls(c.gpu_model):
        return "reduction inside NVSwitch (NVLS) is off, the fastest all-reduce in such a node"
    return None


def has_nvls(model: str | None) -> bool:
    """Multicast in NVSwitch came with Hopper."""
    return any(
        name in (model or "") for name in ("H100", "H200", "H800", "H20", "B100", "B200", "B300", "GB200", "GB300")
    )


def _loopback(value: str, c: ClusterConfig) -> str | None:
    only = selected(value, ["lo", "any-other"]) == ["lo"]
    return "the loopback interface reaches no other node" if only and _several_hosts(c) else None


def _several_hosts(c: ClusterConfig) -> bool:
    return c.nodes > 1 and c.executor.value == "slurm"


def _debug(value: str, c: ClusterConfig) -> str | None:
    return "a line for every call: slow, and it fills the disk" if value.upper() == "TRACE" else None


def _debug_file(value: str, c: ClusterConfig) -> str | None:
    if c.nproc_per_node > 1 and "%p" not in value:
        return "all ranks of a node write over one file; put %h and %p into the name, or leave it to clusterrun"
    return None


def _no_error_handling(value: str, c: ClusterConfig) -> str | None:
    return "a rank that lost its peers hangs for ever instead of failing, so nothing restarts" if value == "0" else None


def _blocking(value: str, c: ClusterConfig) -> str | None:
    return "the host waits for every collective: computing and communication no longer overlap" if _on(value) else None


def _detail(value: str, c: ClusterConfig) -> str | None:
    return "every collective is preceded by another that compares its arguments" if value.upper() == "DETAIL" else None


_NCCL: tuple[tuple[tuple[str, ...], Bad], ...] = (
    (("NCCL_P2P_DISABLE",), _p2p_disable),
    (("NCCL_P2P_LEVEL",), _p2p_level),
    (("NCCL_SHM_DISABLE",), _shm_disable),
    (("NCCL_IB_DISABLE",), _ib_disable),
    (("NCCL_NET",), _net),
    (("NCCL_NET_GDR_LEVEL",), _gdr_level),
    (("NCCL_ALGO", "NCCL_PROTO"), _forced),
    (("NCCL_NVLS_ENABLE",), _nvls),
    (("NCCL_SOCKET_IFNAME",), _loopback),
    (("NCCL_DEBUG",), _debug),
    (("NCCL_DEBUG_FILE",), _debug_file),
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), _no_error_handling),
    (("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING"), _blocking),
)
_ANY: tuple[tuple[tuple[str, ...], Bad], ...] = (
    (("GLOO_SOCKET_IFNAME",), _loopback),
    (("TORCH_DISTRIBUTED_DEBUG",), _detail),
)
