"""Which ranks are measured together, and in which order. Torch-free.

Ranks are numbered node by node, as torchrun does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALL, IN_NODE, PAIRS, BETWEEN_NODES = "all", "in_node", "pairs", "between_nodes"
NODE_PAIR, RAIL = "node_pair", "rail"  # of preflight: two whole nodes, and one rank of each
# What preflight asks for: a node by itself, neighbours in a ring of nodes, two nodes as a whole and rank by rank.
BY_ITSELF, RING, TWO = "by_itself", "ring", "two"
BENCH_GROUPS = (ALL, IN_NODE, BETWEEN_NODES, PAIRS)


@dataclass(frozen=True)
class Phase:
    """Groups that are measured at the same time; a rank is in one of them at most."""

    name: str
    groups: tuple[tuple[int, ...], ...]


def bench_phases(wanted: Sequence[str], nodes: int, per_node: int) -> list[Phase]:
    """The phases of a bench over all ranks. What would be the same groups again is left out."""
    phases = []
    in_node = IN_NODE in wanted and per_node > 1
    if ALL in wanted and nodes * per_node > 1:
        phases.append(Phase(ALL, (tuple(range(nodes * per_node)),)))
        in_node = in_node and nodes > 1
    if in_node:
        phases.append(Phase(IN_NODE, node_groups(nodes, per_node)))
    if BETWEEN_NODES in wanted and nodes > 1 and (per_node > 1 or ALL not in wanted):
        phases.append(Phase(BETWEEN_NODES, (tuple(range(0, nodes * per_node, per_node)),)))
    if PAIRS in wanted:
        phases += pair_phases(nodes, per_node)
    return phases


def node_groups(nodes: int, per_node: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(node * per_node, (node + 1) * per_node)) for node in range(nodes))


def pair_phases(nodes: int, per_node: int) -> list[Phase]:
    """Each pair of ranks in a node: one pair at a time, all nodes at once.

    Pairs without a common rank come first one after the other (the rounds of a tournament): when a rank hangs, the few
    pairs that can be tried before giving up all point at it.
    """
    phases = []
    for pair in (pair for round_ in tournament(per_node) for pair in round_):
        groups = tuple((node * per_node + pair[0], node * per_node + pair[1]) for node in range(nodes))
        phases.append(Phase(PAIRS, groups))
    return phases


def work_phases(kind: str, nodes: int, per_node: int) -> tuple[Phase, ...]:
    """The phases of preflight for a job of so many nodes. ``kind``: BY_ITSELF, RING or TWO."""
    if kind == BY_ITSELF:
        return in_node_phases(per_node)
    if kind == RING:
        whole = node_groups(nodes, per_node)
        return tuple(Phase(NODE_PAIR, tuple(whole[a] + whole[b] for a, b in round_)) for round_ in ring_rounds(nodes))
    rails = tuple(Phase(RAIL, ((local, per_node + local),)) for local in range(per_node))
    return (Phase(NODE_PAIR, (tuple(range(2 * per_node)),)), *(rails if per_node > 1 else ()))


def in_node_phases(per_node: int) -> tuple[Phase, ...]:
    """Of a node by itself: all its ranks, then each pair (of two ranks that would be the same again)."""
    if per_node < 2:
        return ()
    whole = Phase(IN_NODE, node_groups(1, per_node))
    return (whole, *(pair_phases(1, per_node) if per_node > 2 else ()))


def tournament(members: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds without a common member (the circle method)."""
    circle: list[int | None] = [*range(members), *([None] if members % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def ring_rounds(members: int) -> list[list[tuple[int, int]]]:
    """The neighbours of a ring, in two rounds (three when odd): every member meets two others, or the only other."""
    if members < 2:
        return []
    if members == 2:
        return [[(0, 1)]]
    links = [(i, (i + 1) % members) for i in range(members)]
    even, odd = links[0 : members - 1 : 2], links[1:members:2]
    last = [links[-1]] if members % 2 else []
    return [[(min(pair), max(pair)) for pair in round_] for round_ in (even, odd, last) if round_]
