"""What NCCL really used, held against the declared wiring: silent fall-backs become findings.

Costs are ratios of the rates that ``cluster.interconnect`` and NCCL's own bandwidth constants give (topo.h of 2.30:
NVLink 20 GB/s per link; 10 between sockets, taken here for host memory too); an order of magnitude, not a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterrun.config.schema import Accelerator, ClusterConfig, InterNode, IntraNode
from clusterrun.nccl.harm import RDMA, has_nvls
from clusterrun.nccl.log import NcclLog

_NVLINK_GB_S, _HOST_GB_S, _SOCKET_GB_S = 20.0, 10.0, 1.5  # per link; through host memory; one TCP stream set
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


def fallbacks(log: NcclLog, cluster: ClusterConfig) -> list[Fallback]:
    """What is slower than declared. Empty also when the log says nothing: see ``unclear``."""
    if cluster.accelerator is not Accelerator.cuda:
        return []
    return [*_in_node(log, cluster), *_between(log, cluster)]


def unclear(log: NcclLog) -> str:
    """Why nothing can be concluded, or ""."""
    if not log.lines:
        return "no NCCL lines were found"
    return "" if log.connected or log.finished else "the log ends before transports were chosen"


def _in_node(log: NcclLog, cluster: ClusterConfig) -> list[Fallback]:
    wiring, found = cluster.interconnect, []
    shared = [pair for pair, kinds in log.pairs.items() if "SHM" in kinds]
    network = [
        pair
        for pair, kinds in log.pairs.items()
        if any(kind.startswith("NET/") for kind in kinds) and log.same_host(pair)
    ]
    partly = wiring.intra_node in (IntraNode.nvlink_pairs, IntraNode.nvlink_hybrid)
    if wiring.intra_node in _ALL_NVLINK or (partly and not any(k.startswith("P2P") for k in log.connected)):
        advice = "NCCL_P2P_DISABLE, peer-to-peer (nvidia-smi topo -p2p r), fabric manager, IPC in the container?"
        links = wiring.nvlinks_per_pair or 0
        for pairs, how, rate in ((shared, "host memory (SHM)", _HOST_GB_S), (network, "the network", _SOCKET_GB_S)):
            if pairs:
                text = f"{_pairs(pairs)} of one node went through {how}, where {wiring.intra_node.value} is declared"
                found.append(Fallback(text, _times(links * _NVLINK_GB_S, rate), advice))
    if wiring.intra_node is IntraNode.nvswitch and has_nvls(cluster.gpu_model) and log.nvls is False:
        cost = "predicted all-reduce in a node about 0.77 of what it could be (365 of 475 GB/s on 8 H100)"
        found.append(Fallback("NVLS is not available", cost, "fabric manager, and a driver with multicast"))
    return found


def _between(log: NcclLog, cluster: ClusterConfig) -> list[Fallback]:
    wiring = cluster.interconnect
    if cluster.nodes == 1:
        return []
    rate = (wiring.nic_gbit_per_s or 0.0) / 8 * (wiring.nics_per_node or 1)
    sockets = log.connected["NET/Socket"] or (not log.connected and "Socket" in log.networks)
    if sockets and wiring.inter_node in (*RDMA, InterNode.efa):
        why = f": {log.no_ib}" if log.no_ib else ""
        text = f"TCP sockets between nodes, where {wiring.inter_node.value} is declared{why}"
        advice = "NCCL_IB_DISABLE, libibverbs or the network plugin in the container, NCCL_IB_HCA?"
        return [Fallback(text, _times(rate, _SOCKET_GB_S), advice)]
    if wiring.inter_node not in RDMA:
        return []
    found = []
    if log.staged and not log.gpudirect and log.connected["NET/IB"]:
        advice = "load nvidia_peermem or use a driver with dma-buf; NCCL_NET_GDR_LEVEL"
        found.append(
            Fallback("no connection between nodes uses GPUDirect RDMA: copied through host memory", "", advice)
        )
    if wiring.nics_per_node and log.nics and len(log.nics) < wiring.nics_per_node:
        text = f"{len(log.nics)} of {wiring.nics_per_node} declared NICs used ({', '.join(log.nics)})"
        cost = f"predicted bandwidth between nodes {len(log.nics) / wiring.nics_per_node:.0%} of the declared"
        found.append(Fallback(text, cost, "see nic_state in preflight, and NCCL_IB_HCA"))
    return found


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{one}-{other}" for one, other in sorted(pairs)[:4])
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    return f"ranks {shown}{more}"


def _times(declared: float, real: float) -> str:
    return f"predicted about {declared / real:.0f} times slower" if declared > real else ""
