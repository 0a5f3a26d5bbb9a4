"""What NCCL really used, held against the declared wiring: silent fall-backs become findings.

What each costs is predicted by the cost model for the run's own cluster and training step: the step on the declared
wiring, and on what is left of it (``cost/degraded.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterrun.config.schema import Accelerator, ClusterConfig, InterNode, IntraNode, RunConfig
from clusterrun.cost import degraded
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.degraded import Change
from clusterrun.cost.prediction import compare
from clusterrun.cost.wiring import Unknown, declared
from clusterrun.nccl.harm import RDMA, has_nvls
from clusterrun.nccl.log import NcclLog

_ALL_NVLINK = (IntraNode.nvswitch, IntraNode.nvlink_mesh)


@dataclass(frozen=True)
class Fallback:
    """One thing that is not as declared."""

    text: str
    cost: str = ""  # predicted, in words; "" when it can't be said
    advice: str = ""

    def __str__(self) -> str:
        return self.text + (f", {self.cost}" if self.cost else "") + (f" ({self.advice})" if self.advice else "")


def used(log: NcclLog) -> str:
    """One line: what was used."""
    if not log.lines:
        return "no NCCL lines"
    parts = [f"NCCL {log.version}"] if log.version else []
    parts += [f"{kind} x{number}" for kind, number in sorted(log.connected.items())]
    if log.gpudirect:
        parts.append(f"GPUDirect RDMA on {log.gpudirect} of {log.gpudirect + log.staged}")
    if log.channels is not None:
        parts.append(f"{log.channels} channels" + (f", {log.nvls_channels} NVLS" if log.nvls_channels else ""))
    if log.nics:
        parts.append("NICs " + ", ".join(log.nics))
    elif log.networks:
        parts.append("network " + ", ".join(sorted(log.networks)))
    chosen = {f"{algo}/{proto}" for _, algo, proto in log.algorithms}
    return ", ".join(parts + ([f"algorithms {', '.join(sorted(chosen))}"] if chosen else [])) or "no transport named"


def fallbacks(log: NcclLog, config: RunConfig, catalog: Catalog) -> list[Fallback]:
    """What is slower than declared. Empty also when the log says nothing: see ``unclear``."""
    cluster = config.cluster
    if cluster.accelerator is not Accelerator.cuda:
        return []
    return [
        Fallback(text, _cost(config, catalog, change), advice)
        for text, change, advice in (*_in_node(log, cluster), *_between(log, cluster))
    ]


def _cost(config: RunConfig, catalog: Catalog, change: Change) -> str:
    """In words; "" where the cluster or its hardware is not known."""
    wiring = declared(config.cluster, catalog)
    if isinstance(wiring, Unknown):
        return ""
    effect = compare(config, catalog, wiring, change(wiring, catalog.parameters()))
    times = effect.after_s / effect.before_s
    if times < 1.03:
        return f"predicted to cost {effect.what} of this job nothing"
    return (
        f"predicted: {effect.what} takes {_time(effect.after_s)} instead of {_time(effect.before_s)}, "
        f"{f'{times:,.0f}' if times >= 10 else f'{times:.2g}'} times as long"
    )


def unclear(log: NcclLog) -> str:
    """Why nothing can be concluded, or ""."""
    if not log.lines:
        return "no NCCL lines were found"
    return "" if log.connected or log.finished else "the log ends before transports were chosen"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


Found = tuple[str, Change, str]  # what is not as declared, what that makes of the wiring, advice


def _in_node(log: NcclLog, cluster: ClusterConfig) -> list[Found]:
    wiring = cluster.interconnect
    found: list[Found] = []
    shared = [pair for pair, kinds in log.pairs.items() if "SHM" in kinds]
    network = [
        pair
        for pair, kinds in log.pairs.items()
        if any(kind.startswith("NET/") for kind in kinds) and log.same_host(pair)
    ]
    partly = wiring.intra_node in (IntraNode.nvlink_pairs, IntraNode.nvlink_hybrid)
    if wiring.intra_node in _ALL_NVLINK or (partly and not any(k.startswith("P2P") for k in log.connected)):
        advice = "NCCL_P2P_DISABLE, peer-to-peer (nvidia-smi topo -p2p r), fabric manager, IPC in the container?"
        for pairs, how, change in (
            (shared, "host memory (SHM)", degraded.host_memory),
            (network, "the network", degraded.sockets_in_node),
        ):
            if pairs:
                text = f"{_pairs(pairs)} of one node went through {how}, where {wiring.intra_node.value} is declared"
                found.append((text, change, advice))
    if wiring.intra_node is IntraNode.nvswitch and has_nvls(cluster.gpu_model) and log.nvls is False:
        advice = "fabric manager, and a driver with multicast"
        found.append(("NVLS is not available", degraded.without_nvls, advice))
    return found


def _between(log: NcclLog, cluster: ClusterConfig) -> list[Found]:
    wiring = cluster.interconnect
    if cluster.nodes == 1:
        return []
    sockets = log.connected["NET/Socket"] or (not log.connected and "Socket" in log.networks)
    if sockets and wiring.inter_node in (*RDMA, InterNode.efa):
        why = f": {log.no_ib}" if log.no_ib else ""
        text = f"TCP sockets between nodes, where {wiring.inter_node.value} is declared{why}"
        advice = "NCCL_IB_DISABLE, libibverbs or the network plugin in the container, NCCL_IB_HCA?"
        return [(text, degraded.sockets, advice)]
    if wiring.inter_node not in RDMA:
        return []
    found: list[Found] = []
    if log.staged and not log.gpudirect and log.connected["NET/IB"]:
        advice = "load nvidia_peermem or use a driver with dma-buf; NCCL_NET_GDR_LEVEL"
        text = "no connection between nodes uses GPUDirect RDMA: copied through host memory"
        found.append((text, degraded.staged, advice))
    if wiring.nics_per_node and log.nics and len(log.nics) < wiring.nics_per_node:
        text = f"{len(log.nics)} of {wiring.nics_per_node} declared NICs used ({', '.join(log.nics)})"
        change = degraded.fewer_nics(len(log.nics), wiring.nics_per_node)
        found.append((text, change, "see nic_state in preflight, and NCCL_IB_HCA"))
    return found


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{one}-{other}" for one, other in sorted(pairs)[:4])
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    return f"ranks {shown}{more}"
