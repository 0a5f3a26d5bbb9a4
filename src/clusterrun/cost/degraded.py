"""Wirings slower than declared: what a variable in the environment, or a silent fall-back of NCCL, makes of one.

Each change is a function of the declared wiring, so that its cost follows from the cluster and the job at hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from clusterrun.config.schema import Accelerator, ClusterConfig, InterNode, IntraNode
from clusterrun.cost.catalog import ModelParameters
from clusterrun.cost.wiring import Wiring

Change = Callable[[Wiring, ModelParameters], Wiring]
_ON = ("1", "true", "yes", "on")
_FABRIC = (InterNode.infiniband, InterNode.roce, InterNode.efa)
_ALGORITHMS = {"ring": ("ring",), "tree": ("tree",), "nvls": ("nvls",), "nvlstree": ("nvls_tree",)}


def host_memory(w: Wiring, p: ModelParameters) -> Wiring:
    """GPUs of a node exchange data through host memory."""
    rate = min(w.intra_gb_per_s, p.host_gb_per_s)
    return replace(w, intra_gb_per_s=rate, intra_what="host memory", nvls_gb_per_s=None) if w.per_node > 1 else w


def sockets_in_node(w: Wiring, p: ModelParameters) -> Wiring:
    """GPUs of a node talk over TCP sockets."""
    rate = min(w.intra_gb_per_s, p.socket_gb_per_s)
    return replace(w, intra_gb_per_s=rate, intra_what="TCP sockets", nvls_gb_per_s=None) if w.per_node > 1 else w


def sockets(w: Wiring, p: ModelParameters) -> Wiring:
    """TCP sockets between nodes."""
    rate = min(w.inter_gb_per_s, p.socket_gb_per_s)
    return replace(w, inter_gb_per_s=rate, inter_what="TCP sockets", network="ethernet") if w.nodes > 1 else w


def staged(w: Wiring, p: ModelParameters) -> Wiring:
    """No GPUDirect RDMA: what leaves a GPU for another node is copied through host memory."""
    rate = w.per_node * p.host_gb_per_s
    return replace(w, inter_gb_per_s=rate, inter_what="host memory") if w.inter_gb_per_s > rate else w


def without_nvls(w: Wiring, p: ModelParameters) -> Wiring:
    return replace(w, nvls_gb_per_s=None)


def fewer_nics(used: int, of: int) -> Change:
    """So many of the declared NICs."""
    return lambda w, p: replace(
        w, inter_gb_per_s=w.inter_gb_per_s * used / of, inter_what=f"{used} of {of} NICs per node"
    )


def only(algorithms: tuple[str, ...]) -> Change:
    return lambda w, p: replace(w, algorithms=algorithms)


def by_environment(environ: Mapping[str, str], cluster: ClusterConfig) -> Iterator[tuple[str, Change]]:
    """Variables that hold NCCL back from what is declared: "NAME=value", and what becomes of the wiring."""
    if cluster.accelerator is not Accelerator.cuda:
        return
    wires = cluster.interconnect
    for name, value in environ.items():
        if not name.startswith("NCCL_"):
            continue
        low = value.strip().lower()
        change: Change | None = None
        fabric = wires.inter_node in _FABRIC and cluster.nodes > 1
        if (name == "NCCL_P2P_DISABLE" and low in _ON) or (name == "NCCL_P2P_LEVEL" and low in ("loc", "0")):
            change = host_memory
        elif (name == "NCCL_IB_DISABLE" and low in _ON and wires.inter_node is not InterNode.efa and fabric) or (
            name == "NCCL_NET" and low == "socket" and fabric
        ):
            change = sockets
        elif name == "NCCL_NET_GDR_LEVEL" and low in ("loc", "0") and fabric:
            change = staged
        elif name == "NCCL_NVLS_ENABLE" and low == "0" and wires.intra_node is IntraNode.nvswitch:
            change = without_nvls
        elif name == "NCCL_ALGO":
            allowed = allowed_algorithms(low)
            change = only(allowed) if allowed else None
        elif name == "NCCL_IB_HCA" and fabric:
            named = named_nics(value)
            if named and wires.nics_per_node and named < wires.nics_per_node:
                change = fewer_nics(named, wires.nics_per_node)
        if change is not None:
            yield f"{name}={value.strip()}", change


def allowed_algorithms(value: str) -> tuple[str, ...] | None:
    """Of NCCL_ALGO, for all-reduce: "ring", "^tree", "allreduce:tree,ring". None for what is not known here."""
    for part in value.lower().split(";"):
        collective, colon, listed = part.rpartition(":")
        if colon and collective.strip() != "allreduce":
            continue
        names = [name.strip() for name in listed.strip().lstrip("^").split(",")]
        if not all(name in _ALGORITHMS for name in names):
            return None
        chosen = [algorithm for name in names for algorithm in _ALGORITHMS[name]]
        if listed.strip().startswith("^"):
            return tuple(a for each in _ALGORITHMS.values() for a in each if a not in chosen)
        return tuple(chosen)
    return None


def named_nics(value: str) -> int | None:
    """How many NICs an NCCL_IB_HCA names one by one (mlx5_0,mlx5_3:1); None for prefixes and exclusions."""
    names = [part.strip() for part in value.strip().lstrip("=").split(",")]
    if value.strip().startswith("^") or not all(re.fullmatch(r"\w+_\d+(:\d+)?", name) for name in names):
        return None
    return len(set(names))
