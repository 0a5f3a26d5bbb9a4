"""The slow check of the wires between nodes: which node, path, GPU or NIC it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clusterrun.measure.blame import Blame, blame
from clusterrun.preflight.checks.per_gpu import several
from clusterrun.preflight.checks.slow_parts import (
    FAIL,
    PASS,
    RETRY,
    UNKNOWN,
    WARN,
    rank_name,
    rate_text,
    slow_below,
)
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import Finding
from clusterrun.preflight.slow import NodePair, SlowEvidence


def between_nodes(e: Evidence) -> Iterator[Finding]:
    if e.slow is None or len(e.slow.paired) < 2:
        return
    pairs = e.slow.newest()
    who = between(e, e.slow)
    declared = declared_rate(e)
    later = {b for _, b in who.pairs}
    by_node: dict[str, list[NodePair]] = {}
    for pair in pairs.values():
        for end in pair.key:
            by_node.setdefault(end, []).append(pair)
    for node in e.slow.paired:
        own = by_node.get(node, [])
        text = several([_node_pair(node, pair) for pair in own], "; ")
        usual = f", others reach {rate_text(who.expected, 'B/s')}" if who.expected else ""
        path = next((pair for pair in who.pairs if node in pair), None)
        if not own:
            yield Finding("between_nodes", node, UNKNOWN, "not measured with any other node", RETRY)
        elif any(pair.wrong for pair in own):
            yield Finding("between_nodes", node, FAIL, f"wrong results: {text}", "do not train on it")
        elif node in who.members:
            rails = _rails(e, node, own, who.expected)
            yield Finding(
                "between_nodes", node, FAIL, f"slow with everybody: {text}{usual}{rails}", "NIC, cable or port"
            )
        elif path and len(e.slow.paired) > 2:
            other = path[0] if path[1] == node else path[1]
            verdict = FAIL if node in later else WARN
            text = f"the path to {other} is slow ({text}); both are fast with others{usual}"
            yield Finding("between_nodes", node, verdict, text, "switch or cable between them; without one of the two")
        elif path:
            yield Finding("between_nodes", node, FAIL, text, "NIC, cable, port or firewall of one of the two")
        elif declared and max(pair.rate or 0 for pair in own) < slow_below(e) * declared:
            text = f"{text}; declared {rate_text(declared, 'B/s')}"
            yield Finding("between_nodes", node, WARN, text, "or cluster.interconnect says more than there is")
        elif not any(is_fast(e, pair, who.expected) for pair in own):
            others = any(is_fast(e, pair, who.expected) for pair in pairs.values())
            verdict = UNKNOWN if others else FAIL
            yield Finding("between_nodes", node, verdict, f"met nobody that is fast: {text}{usual}", RETRY)
        elif who.expected is None and not declared:
            text = f"{text}; nothing to hold it against"
            yield Finding("between_nodes", node, UNKNOWN, text, "declare cluster.interconnect.nic_gbit_per_s")
        else:
            sound = [pair for pair in own if pair.rate is not None and not set(pair.key) & set(who.members)]
            text = several([_node_pair(node, pair) for pair in sound], "; ")
            yield Finding("between_nodes", node, PASS, f"busbw {text}")


def between(e: Evidence, slow: SlowEvidence) -> Blame[str]:
    """Who is slow between nodes, by all that is known so far."""
    return blame({key: pair.rate for key, pair in slow.newest().items()}, slow_below(e))


def is_fast(e: Evidence, pair: NodePair, expected: float | None) -> bool:
    """Whether two nodes reach what is usual, or anything where nothing is."""
    return pair.rate is not None and (expected is None or pair.rate >= slow_below(e) * expected)


def declared_rate(e: Evidence) -> float | None:
    """What the declared NICs of a node carry each way, bytes per second."""
    wiring = e.cluster.interconnect
    return wiring.nic_gbit_per_s * 1e9 / 8 * (wiring.nics_per_node or 1) if wiring.nic_gbit_per_s else None


def _node_pair(node: str, pair: NodePair) -> str:
    other = pair.b if pair.a == node else pair.a
    return f"{rate_text(pair.rate, 'B/s') if pair.rate is not None else pair.why or 'no answer'} with {other}"


def _rails(e: Evidence, node: str, pairs: Sequence[NodePair], expected: float | None) -> str:
    """Which of the node's ranks, hence which GPU or NIC, is slow, where that was looked at and is not all of them."""
    rails = next((dict(pair.rails) for pair in pairs if pair.rails), {})
    rates = [rate for rate in rails.values() if rate]
    if len(rails) < 2 or not rates:
        return ""
    best = max(rates)
    slow = [local for local, rate in rails.items() if rate is None or rate < slow_below(e) * best]
    if not slow:
        return f"; all {len(rails)} ranks of it alike: what they share"
    names = several([f"{rank_name(e, node, one)} {rate_text(rails[one] or 0, 'B/s')}" for one in slow], ", ")
    return f"; slow through {names} (others {rate_text(best, 'B/s')}): that GPU or its NIC"
