"""The slow checks (preflight=full): what was measured, held against the peers. Who is slow is named, not only that
something is.

"Usual" is the median of the peers; slow is below ``preflight.slow_below`` of it and, for single values, outside of
their spread. Workers on CPUs share cores and memory, so that only a gross difference says something there.
Without a peer there is nothing to hold a value against: UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from clusterrun.config.schema import Accelerator
from clusterrun.measure.blame import Blame, blame, outliers, usual_best
from clusterrun.measure.groups import IN_NODE, PAIRS
from clusterrun.measure.results import COPIES, IMPORT, PRODUCT, WAIT, DeviceResult, NodeMeasured, Row, Stuck
from clusterrun.preflight.checks.per_gpu import label, several, topology_of
from clusterrun.preflight.evidence import Check, Evidence
from clusterrun.preflight.gpu_facts import GpuHealth
from clusterrun.preflight.report import Finding, Verdict
from clusterrun.preflight.slow import NodePair, SlowEvidence

Key = TypeVar("Key", str, tuple[str, int])

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
_GPU_BELOW, _CPU_BELOW = 0.75, 0.25
_RETRY = "see attempts/<n>/steps/preflight-*.err"


def measured(e: Evidence) -> Iterator[Finding]:
    """Every node answered, and what did not come to an end is another check's business."""
    for node in e.slow.asked if e.slow else ():
        said = e.slow.local.get(node) if e.slow else None
        if said is None:
            yield Finding("measured", node, FAIL, "the slow checks did not answer; they were killed", _RETRY)
            continue
        broken = [one for one in said.stuck if one.what in (IMPORT, WAIT)]
        if broken:
            text = several([f"{_rank(e, node, one.local)}: {_at(one)}: {one.why}" for one in broken], "; ")
            yield Finding("measured", node, UNKNOWN, text, _RETRY)
        else:
            yield Finding("measured", node, PASS, "all parts ended")


def gemm_speed(e: Evidence) -> Iterator[Finding]:
    judged = _among_peers(e, lambda d: d.flops, "FLOP/s")

    def one(node: str, device: DeviceResult) -> tuple[Verdict, str]:
        if device.repeatable is False:
            return FAIL, "the same product gave other bits"
        return judged.get((node, device.local), (UNKNOWN, "not measured"))

    yield from _per_device("gemm_speed", e, PRODUCT, one, "a GPU that throttles or fails: look at clocks, power, heat")


def copy_speed(e: Evidence) -> Iterator[Finding]:
    ways = {
        "to the device": _among_peers(e, lambda d: d.to_device, "B/s"),
        "from the device": _among_peers(e, lambda d: d.from_device, "B/s"),
    }

    def one(node: str, device: DeviceResult) -> tuple[Verdict, str]:
        both = [(way, judged.get((node, device.local), (UNKNOWN, "not measured"))) for way, judged in ways.items()]
        way, (verdict, text) = max(both, key=lambda part: _WORSE.index(part[1][0]))
        return verdict, f"{way} {text}"

    yield from _per_device("copy_speed", e, COPIES, one, "PCIe slot, riser, or a wrong NUMA binding")


def pcie_under_load(e: Evidence) -> Iterator[Finding]:
    """Only where there are GPUs: nothing of a CPU hangs on PCIe."""
    if e.cluster.accelerator is not Accelerator.cuda:
        return

    def one(node: str, device: DeviceResult) -> tuple[Verdict, str]:
        gpu = _health(e, node, device)
        if device.pcie_gen is None or device.pcie_width is None:
            return UNKNOWN, device.pcie_problem or "not measured"
        now = f"generation {device.pcie_gen} x{device.pcie_width} while copying"
        if gpu is None or gpu.pcie_gen_max is None or gpu.pcie_width_max is None:
            return UNKNOWN, f"{now}, what it could be is not known"
        if device.pcie_gen < gpu.pcie_gen_max or device.pcie_width < gpu.pcie_width_max:
            return FAIL, f"{now}, could be generation {gpu.pcie_gen_max} x{gpu.pcie_width_max}"
        return PASS, now

    yield from _per_device("pcie_under_load", e, COPIES, one, "reseat the card; check the slot and the BIOS setting")


def all_reduce_in_node(e: Evidence) -> Iterator[Finding]:
    rows = {node: row for node, said in _local(e) for row in said.rows if row.phase == IN_NODE}
    judged = _judged({node: row.best_busbw for node, row in rows.items()}, slow_below(e), "B/s")
    for node, said in _local(e):
        stuck = next((one for one in said.stuck if one.what == IN_NODE), None)
        if stuck:
            yield Finding("all_reduce_in_node", node, FAIL, f"all-reduce in the node: {stuck.why}", "see gpu_pairs")
        elif node not in rows:
            if e.cluster.nproc_per_node > 1:
                yield Finding("all_reduce_in_node", node, UNKNOWN, _not_reached(said))
        elif rows[node].wrong:
            text = f"wrong results: {rows[node].wrong} elements of an all-reduce in the node"
            yield Finding("all_reduce_in_node", node, FAIL, text, "do not train on it")
        else:
            verdict, text = judged[node]
            yield Finding(
                "all_reduce_in_node", node, verdict, f"busbw {text}", "see gpu_pairs" if verdict is FAIL else ""
            )


def gpu_pairs(e: Evidence) -> Iterator[Finding]:
    """Pairs are held against those of the same wiring (NV18, PIX, ...), of all nodes."""
    if e.cluster.nproc_per_node < 2:
        return
    shares: dict[str, dict[tuple[int, int], float | None]] = {}
    found = {node: _pairs(said) for node, said in _local(e)}
    kinds = {(node, pair): _kind(e, node, pair) for node, pairs in found.items() for pair in pairs}
    for kind in set(kinds.values()):
        of_kind = {
            ((node, a), (node, b)): row.best_busbw
            for node, pairs in found.items()
            for (a, b), row in pairs.items()
            if row is not None and kinds[node, (a, b)] == kind
        }
        usual = usual_best(of_kind)
        for (one, other), rate in of_kind.items():
            if usual:
                shares.setdefault(one[0], {})[(one[1], other[1])] = rate / usual
    for node, said in _local(e):
        pairs = found[node]
        if not pairs:
            yield Finding("gpu_pairs", node, UNKNOWN, _not_reached(said))
            continue
        hung = {pair: None for pair, row in pairs.items() if row is None}
        wrong = [pair for pair, row in pairs.items() if row is not None and row.wrong]
        who = blame({**shares.get(node, {}), **hung}, slow_below(e), expected=1.0)
        if wrong:
            text = several([f"{_pair(e, node, pair)}: wrong results" for pair in wrong], "; ")
            yield Finding("gpu_pairs", node, FAIL, text, "do not train on it")
        elif who.members or who.pairs:
            text = several(_named(e, node, who, pairs, kinds), "; ")
            yield Finding("gpu_pairs", node, FAIL, text, "link, bridge or slot of what is named")
        elif not shares.get(node):
            rates = ", ".join(_rate(row.best_busbw, "B/s") for row in pairs.values() if row is not None)
            yield Finding("gpu_pairs", node, UNKNOWN, f"{rates}; no pair to hold it against")
        else:
            slowest = min(row.best_busbw for row in pairs.values() if row is not None)
            yield Finding("gpu_pairs", node, PASS, f"{len(pairs)} pairs, the slowest {_rate(slowest, 'B/s')}")


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
        usual = f", others reach {_rate(who.expected, 'B/s')}" if who.expected else ""
        path = next((pair for pair in who.pairs if node in pair), None)
        if not own:
            yield Finding("between_nodes", node, UNKNOWN, "not measured with any other node", _RETRY)
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
            text = f"{text}; declared {_rate(declared, 'B/s')}"
            yield Finding("between_nodes", node, WARN, text, "or cluster.interconnect says more than there is")
        elif not any(is_fast(e, pair, who.expected) for pair in own):
            others = any(is_fast(e, pair, who.expected) for pair in pairs.values())
            verdict = UNKNOWN if others else FAIL
            yield Finding("between_nodes", node, verdict, f"met nobody that is fast: {text}{usual}", _RETRY)
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


def slow_below(e: Evidence) -> float:
    """The share of the peers' rate below which one is slow."""
    if e.preflight.slow_below is not None:
        return e.preflight.slow_below
    return _GPU_BELOW if e.cluster.accelerator is Accelerator.cuda else _CPU_BELOW


def declared_rate(e: Evidence) -> float | None:
    """What the declared NICs of a node carry each way, bytes per second."""
    wiring = e.cluster.interconnect
    return wiring.nic_gbit_per_s * 1e9 / 8 * (wiring.nics_per_node or 1) if wiring.nic_gbit_per_s else None


def _local(e: Evidence) -> Iterator[tuple[str, NodeMeasured]]:
    if e.slow is not None:
        yield from e.slow.local.items()


_WORSE = (PASS, WARN, UNKNOWN, FAIL)


def _per_device(
    name: str,
    e: Evidence,
    part: str,
    judge: Callable[[str, DeviceResult], tuple[Verdict, str]],
    advice: str,
) -> Iterator[Finding]:
    """One finding for all devices of a node: the worst, those that did not pass named."""
    for node, said in _local(e):
        lines: list[tuple[Verdict, str]] = []
        for local in range(e.cluster.nproc_per_node):
            stuck = next((one for one in said.stuck if one.what == part and one.local == local), None)
            device = next((one for one in said.devices if one.local == local), None)
            if stuck:
                verdict, text = FAIL, f"{part}: {stuck.why}"
            elif device is None:
                verdict, text = UNKNOWN, "not measured"
            else:
                verdict, text = judge(node, device)
            lines.append((verdict, f"{_rank(e, node, local)}: {text}"))
        worst = max((verdict for verdict, _ in lines), key=_WORSE.index)
        shown = [text for verdict, text in lines if verdict is worst]
        text = shown[0] if worst is PASS and len(shown) == 1 else several(shown, "; ")
        yield Finding(name, node, worst, text, advice if worst is FAIL else "")


def _among_peers(
    e: Evidence, value: Callable[[DeviceResult], float | None], unit: str
) -> dict[tuple[str, int], tuple[Verdict, str]]:
    """(node, local rank) -> how its value stands among all devices of the same model."""
    by_model: dict[str | None, dict[tuple[str, int], float]] = {}
    for node, said in _local(e):
        for device in said.devices:
            rate = value(device)
            if rate is not None:
                by_model.setdefault(_model(e, node, device), {})[node, device.local] = rate
    judged: dict[tuple[str, int], tuple[Verdict, str]] = {}
    for values in by_model.values():
        judged |= _judged(values, slow_below(e), unit)
    return judged


def _judged(values: Mapping[Key, float], below: float, unit: str) -> dict[Key, tuple[Verdict, str]]:
    """Each value among the others."""
    found = {}
    for key, (slow, usual) in outliers(values, below).items():
        own = _rate(values[key], unit)
        if slow is None:
            found[key] = UNKNOWN, f"{own}, no peer to hold it against"
        else:
            found[key] = (FAIL, f"{own}, the peers {_rate(usual, unit)}") if slow else (PASS, own)
    return found


def _pairs(said: NodeMeasured) -> dict[tuple[int, int], Row | None]:
    """Local ranks -> the row, None for a pair that did not come to an end. In a node of two, both are the pair."""
    found: dict[tuple[int, int], Row | None] = {}
    for row in said.rows:
        if row.phase == PAIRS or (row.phase == IN_NODE and len(row.ranks) == 2):
            found[row.ranks[0], row.ranks[1]] = row
    for stuck in said.stuck:
        if stuck.what == PAIRS or (stuck.what == IN_NODE and len(stuck.ranks) == 2):
            found[stuck.ranks[0], stuck.ranks[1]] = None
    return found


def _named(
    e: Evidence,
    node: str,
    who: Blame[int],
    pairs: dict[tuple[int, int], Row | None],
    kinds: dict[tuple[str, tuple[int, int]], str],
) -> list[str]:
    lines = []
    for member in who.members:
        own = [row for pair, row in pairs.items() if member in pair]
        rates = [row.best_busbw for row in own if row is not None]
        best = f"at best {_rate(max(rates), 'B/s')}" if rates else "none comes to an end"
        lines.append(f"{_rank(e, node, member)}: all its {len(own)} pairs are slow, {best}")
    for pair in who.pairs:
        row, kind = pairs[pair], kinds[node, pair]
        said = "does not come to an end" if row is None else _rate(row.best_busbw, "B/s")
        lines.append(f"{_pair(e, node, pair)}{f' ({kind})' if kind else ''}: {said}")
    return lines


def _node_pair(node: str, pair: NodePair) -> str:
    other = pair.b if pair.a == node else pair.a
    return f"{_rate(pair.rate, 'B/s') if pair.rate is not None else pair.why or 'no answer'} with {other}"


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
    names = several([f"{_rank(e, node, one)} {_rate(rails[one] or 0, 'B/s')}" for one in slow], ", ")
    return f"; slow through {names} (others {_rate(best, 'B/s')}): that GPU or its NIC"


def _health(e: Evidence, node: str, device: DeviceResult) -> GpuHealth | None:
    report = e.reports.get(node)
    facts = report.gpus.health if report and report.gpus else ()
    return next((gpu for gpu in facts if device.uuid and gpu.uuid == device.uuid), None)


def _model(e: Evidence, node: str, device: DeviceResult) -> str | None:
    gpu = _health(e, node, device)
    return gpu.model if gpu else None


def _rank(e: Evidence, node: str, local: int) -> str:
    """The GPU as it is known elsewhere; a CPU has only its worker's number."""
    said = e.slow.local.get(node) if e.slow else None
    device = next((one for one in said.devices if one.local == local), None) if said else None
    gpu = _health(e, node, device) if device else None
    if gpu is not None:
        return label(gpu)
    return f"{'GPU' if e.cluster.accelerator is Accelerator.cuda else 'worker '}{local}"


def _pair(e: Evidence, node: str, pair: tuple[int, int]) -> str:
    return "-".join(_rank(e, node, local) for local in pair)


def _kind(e: Evidence, node: str, pair: tuple[int, int]) -> str:
    """How the two are joined, as nvidia-smi says it; "" where that is not known."""
    report, said = e.reports.get(node), e.slow.local.get(node) if e.slow else None
    topology = topology_of(report) if report else None
    if topology is None or said is None:
        return ""
    places = []
    for local in pair:
        device = next((one for one in said.devices if one.local == local), None)
        gpu = _health(e, node, device) if device else None
        if gpu is None:
            return ""
        places.append(gpu.index)
    if max(places) >= len(topology.gpus):
        return ""
    link = topology.link(*places)
    return str(link) if link is not None else ""


def _not_reached(said: NodeMeasured) -> str:
    first = next(iter(said.stuck), None)
    return f"not measured: {_at(first)}: {first.why}" if first else "not measured"


def _at(stuck: Stuck) -> str:
    return {WAIT: "waiting for the other ranks", IMPORT: "import of torch"}.get(stuck.what, stuck.what)


def _rate(value: float | None, unit: str) -> str:
    """Three digits with a decimal prefix: 12.5 GB/s."""
    value = value or 0.0
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


SLOW_CHECKS: dict[str, Check] = {
    "measured": measured,
    "gemm_speed": gemm_speed,
    "copy_speed": copy_speed,
    "pcie_under_load": pcie_under_load,
    "all_reduce_in_node": all_reduce_in_node,
    "gpu_pairs": gpu_pairs,
    "between_nodes": between_nodes,
}
