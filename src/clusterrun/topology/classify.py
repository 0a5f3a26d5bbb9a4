"""What the wiring of a node amounts to: its class, islands, weak pairs, and a line or two of advice.

Pure functions over Topology. Pairs that are not known take no part: an incomplete topology is classified by what it
shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from clusterrun.topology.model import Link, LinkKind, Topology

Group = tuple[int, ...]
Pair = tuple[int, int]


class WiringClass(Enum):
    """Classes of the corpus (tests/corpus/topo), and two for what can't be classified."""

    FULL_NVLINK_MESH = "full_nvlink_mesh"  # every pair of GPUs has NVLink
    PARTIAL_NVLINK_MESH = "partial_nvlink_mesh"  # NVLink joins more than two GPUs, but not every pair
    NVLINK_PAIRS = "nvlink_pairs"  # NVLink joins GPUs two by two (bridges)
    PCIE_SAME_SWITCH = "pcie_same_switch"  # no pair crosses a host bridge
    PCIE_SAME_SOCKET = "pcie_same_socket"  # no pair crosses the link between NUMA nodes
    PCIE_CROSS_SOCKET = "pcie_cross_socket"  # some pair does
    SINGLE_GPU = "single_gpu"
    NONE = "none"  # no GPU
    UNKNOWN = "unknown"  # several GPUs, and not one link known


@dataclass(frozen=True)
class WeakPair:
    """Two GPUs with fewer NVLinks than the rest of the node makes expected."""

    gpus: Pair
    link: Link
    expected: Link


@dataclass(frozen=True)
class Wiring:
    """The wiring spelled out; GPUs are positions in Topology.gpus.

    Attributes:
        kind: the class.
        worst, best: worst and best link between two GPUs; None when no pair is known.
        islands: groups that reach one another without leaving NVLink; without NVLink, without crossing a host bridge.
            GPUs of which no link is known are in none.
        sockets: groups that reach one another without crossing NUMA nodes, NVLink left aside.
        pairs: two GPUs joined by NVLink and to nobody else.
        cross_socket: pairs whose path is SYS.
        weak: pairs with fewer NVLinks than expected (a link down, a bridge missing).
        weak_gpus: GPUs that explain the weak pairs when each of their pairs is weak.
        far_from_nics: GPUs without a NIC at PIX or PXB; empty when the node shows no NIC. NCCL uses GPUDirect RDMA
            up to PXB by default (NCCL 2.30.7).
        unknown: pairs whose link is not known.
    """

    kind: WiringClass
    worst: Link | None
    best: Link | None
    islands: tuple[Group, ...]
    sockets: tuple[Group, ...]
    pairs: tuple[Pair, ...]
    cross_socket: tuple[Pair, ...]
    weak: tuple[WeakPair, ...]
    weak_gpus: Group
    far_from_nics: Group
    unknown: tuple[Pair, ...]


def classify(topology: Topology) -> Wiring:
    """Name the class and spell out islands, weak pairs and far NICs."""
    size = len(topology.gpus)
    links = {(i, j): link for i, j, link in topology.pairs() if link is not None}
    ranked = sorted(links.values(), key=lambda link: link.rank)
    nvlink = {pair: link for pair, link in links.items() if link.is_nvlink}
    # A GPU of which nothing is known (lost, unreadable) is in no island: it is not known to be alone.
    seen = {gpu for pair in links for gpu in pair} or set(range(size))
    nvlink_islands = _components(size, nvlink, seen)
    switched = _components(size, _where(links, lambda link: link.kind >= LinkKind.PXB), seen)
    weak, weak_gpus = _weak(nvlink, nvlink_islands)
    return Wiring(
        kind=_kind(size, links, nvlink_islands),
        worst=ranked[0] if ranked else None,
        best=ranked[-1] if ranked else None,
        islands=nvlink_islands if nvlink else switched,
        sockets=_sockets(topology, links),
        pairs=tuple((group[0], group[1]) for group in nvlink_islands if len(group) == 2),
        cross_socket=tuple(_where(links, lambda link: link.kind is LinkKind.SYS)),
        weak=weak,
        weak_gpus=weak_gpus,
        far_from_nics=_far_from_nics(topology),
        unknown=tuple((i, j) for i, j, link in topology.pairs() if link is None),
    )


def _where(links: dict[Pair, Link], test: Callable[[Link], bool]) -> list[Pair]:
    return [pair for pair, link in links.items() if test(link)]


def _components(size: int, edges: Iterable[Pair], members: Iterable[int]) -> tuple[Group, ...]:
    """Connected groups of ``members``; a member without an edge is a group of its own."""
    group = list(range(size))
    for i, j in edges:
        old, new = group[j], group[i]
        group = [new if one == old else one for one in group]
    wanted = sorted(members)
    return tuple(tuple(i for i in wanted if group[i] == name) for name in dict.fromkeys(group[i] for i in wanted))


def _kind(size: int, links: dict[Pair, Link], islands: tuple[Group, ...]) -> WiringClass:
    if size < 2:
        return WiringClass.SINGLE_GPU if size else WiringClass.NONE
    if not links:
        return WiringClass.UNKNOWN
    if all(link.is_nvlink for link in links.values()):
        # A cut paste shows the first rows only, and a lost GPU no link at all: judged by what is shown.
        return WiringClass.FULL_NVLINK_MESH if len(islands) == 1 else WiringClass.PARTIAL_NVLINK_MESH
    largest = max(len(group) for group in islands)
    if largest > 1:
        return WiringClass.NVLINK_PAIRS if largest == 2 else WiringClass.PARTIAL_NVLINK_MESH
    worst = min(link.kind for link in links.values())
    if worst >= LinkKind.PXB:
        return WiringClass.PCIE_SAME_SWITCH
    return WiringClass.PCIE_CROSS_SOCKET if worst is LinkKind.SYS else WiringClass.PCIE_SAME_SOCKET


def _sockets(topology: Topology, links: dict[Pair, Link]) -> tuple[Group, ...]:
    """By the CPUs near each GPU where they are known (NVLink hides the PCIe path), else by links that are not SYS."""
    numa = [gpu.numa for gpu in topology.gpus]
    if all(len(nodes) == 1 for nodes in numa):
        return tuple(
            tuple(i for i, nodes in enumerate(numa) if nodes == group) for group in dict.fromkeys(sorted(numa))
        )
    edges = _where(links, lambda link: link.kind is not LinkKind.SYS)
    return _components(len(topology.gpus), edges, {gpu for pair in links for gpu in pair})


def _weak(links: dict[Pair, Link], islands: tuple[Group, ...]) -> tuple[tuple[WeakPair, ...], Group]:
    """Pairs below what the node makes expected, and the GPUs to blame.

    Not every difference is a fault: V100 hybrid cubes mix NV1 and NV2 by design. So a mesh counts as degraded only when
    its best count is 4 or more (no design mixes those) and either most pairs have it, or each pair is the smaller of
    its two GPUs' best counts, which is what NVSwitch gives when one GPU has lost links.
    """
    weak: list[WeakPair] = []
    blamed: set[int] = set()
    meshes = [group for group in islands if len(group) > 2]
    bridged = [pair for group in islands if len(group) == 2 for pair in links if pair == (group[0], group[1])]
    for group in meshes:
        inside = {pair: link.nvlinks for pair, link in links.items() if pair[0] in group and pair[1] in group}
        best = max(inside.values())
        reach = {gpu: max((n for pair, n in inside.items() if gpu in pair), default=0) for gpu in group}
        switched = all(n == min(reach[i], reach[j]) for (i, j), n in inside.items())
        most = Counter(inside.values())[best] * 2 > len(inside)
        if best < 4 or not (switched or most):
            continue
        low = [pair for pair, n in inside.items() if n < best]
        weak.extend(WeakPair(pair, links[pair], Link(LinkKind.NVLINK, best)) for pair in low)
        if switched:
            blamed.update(gpu for gpu in group if 0 < reach[gpu] < best)
    if bridged:
        best = max(links[pair].nvlinks for pair in bridged)
        expected = Link(LinkKind.NVLINK, best)
        weak.extend(WeakPair(pair, links[pair], expected) for pair in bridged if links[pair].nvlinks < best)
    return tuple(weak), tuple(sorted(blamed))


def _far_from_nics(topology: Topology) -> Group:
    far = []
    for at in range(len(topology.gpus)):
        paths = [nic.links[at] for nic in topology.nics if at < len(nic.links)]
        known = [path for path in paths if path is not None]
        # With an unknown path a near NIC can't be ruled out.
        if known and len(known) == len(paths) and max(path.kind for path in known) < LinkKind.PXB:
            far.append(at)
    return tuple(far)
