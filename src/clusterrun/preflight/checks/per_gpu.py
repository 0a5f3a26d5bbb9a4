"""What checks of GPUs share: which nodes they judge, what is usual among peers, and one line for many GPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from clusterrun.config.schema import Accelerator
from clusterrun.preflight.evidence import Check, Evidence
from clusterrun.preflight.gpu_facts import GpuFacts, GpuHealth
from clusterrun.preflight.report import Finding, NodeReport, Verdict
from clusterrun.topology.model import Topology

Said = tuple[Verdict, str] | None  # None: the check makes no sense for this GPU
PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN

_ORDER = (FAIL, UNKNOWN, WARN, PASS)  # a finding is as bad as its worst part; not knowing is worse than a warning
_SHOWN = 4  # parts of one line before "and n more"


class Peers:
    """The usual value of a fact among all GPUs of one model in this preflight, each found once."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self._gpus = [g for _, r in judged(evidence) for g in (r.gpus.health if r.gpus else ()) if not g.error]
        self._usual: dict[str, dict[str | None, Any]] = {}

    def usual(self, gpu: GpuHealth, fact: str) -> Any:
        """What most peers have, the larger value on a tie; None when nobody knows."""
        if fact not in self._usual:
            seen: dict[str | None, list[Any]] = defaultdict(list)
            for one in self._gpus:
                value = getattr(one, fact)
                if value is not None:
                    seen[one.model].append(len(value) if isinstance(value, tuple) else value)
            self._usual[fact] = {model: usual(values) for model, values in seen.items()}
        return self._usual[fact].get(gpu.model)

    def usual_model(self) -> str | None:
        found: str | None = usual(gpu.model for gpu in self._gpus if gpu.model)
        return found


Judge = Callable[[GpuHealth, Peers], Said]


def usual(values: Iterable[Any]) -> Any:
    """The most frequent value, the larger on a tie; None for none."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value)) if counts else None


def judged(e: Evidence) -> Iterator[tuple[str, NodeReport]]:
    """The nodes whose GPUs are judged: all of a GPU cluster, and any other node that shows GPUs."""
    for node, report in e.reports.items():
        if e.cluster.accelerator is Accelerator.cuda or (report.gpus is not None and report.gpus.health):
            yield node, report


def gpu_check(name: str, judge: Judge, advice: str) -> Check:
    """A check that judges each GPU of a node by itself. A GPU that is lost is gpu_lost's business alone."""

    def check(e: Evidence) -> Iterator[Finding]:
        peers = Peers(e)
        for node, report in judged(e):
            if report.gpus is None or not report.gpus.health:
                yield unread(name, node, report.gpus)
                continue
            answering = [gpu for gpu in report.gpus.health if not gpu.error]
            if not answering:
                yield Finding(name, node, UNKNOWN, "no GPU answers", "see gpu_lost")
            said = [(gpu, judge(gpu, peers)) for gpu in answering]
            yield from together(name, node, said, advice)

    check.__doc__ = judge.__doc__
    return check


def unread(name: str, node: str, facts: GpuFacts | None) -> Finding:
    """The node's GPUs could not be read at all."""
    return Finding(name, node, UNKNOWN, (facts.problem if facts else "") or "the node did not report its GPUs")


def together(name: str, node: str, said: Iterable[tuple[GpuHealth, Said]], advice: str) -> Iterator[Finding]:
    """One finding for all GPUs of a node: those that did not pass, worst first, equal ones named together."""
    by_phrase: dict[tuple[Verdict, str], list[GpuHealth]] = defaultdict(list)
    number = 0
    for gpu, one in said:
        if one is not None:
            by_phrase[one].append(gpu)
            number += 1
    if not by_phrase:
        return
    worst = min((verdict for verdict, _ in by_phrase), key=_ORDER.index)
    parts = sorted(
        (item for item in by_phrase.items() if worst is PASS or item[0][0] is not PASS),
        key=lambda item: _ORDER.index(item[0][0]),
    )
    text = several([f"{named(gpus, number)}: {phrase}" for (_, phrase), gpus in parts], "; ")
    yield Finding(name, node, worst, text, advice if worst in (FAIL, WARN) else "")


def named(gpus: Sequence[GpuHealth], of: int) -> str:
    """One GPU with what it can be recognised by; several by their indices."""
    if len(gpus) == 1:
        return label(gpus[0])
    if len(gpus) == of:
        return f"all {of} GPUs"
    return several([f"GPU{gpu.index}" for gpu in gpus], ", ")


def label(gpu: GpuHealth) -> str:
    """ "GPU5 (serial 165...)": the index may change when the machine is repaired, the serial number does not."""
    identity = f"serial {gpu.serial}" if gpu.serial else gpu.uuid
    return f"GPU{gpu.index} ({identity})" if identity else f"GPU{gpu.index}"


def several(parts: Sequence[str], between: str) -> str:
    """The first few, and how many more there are."""
    rest = len(parts) - _SHOWN
    return between.join(parts[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def topology_of(report: NodeReport) -> Topology | None:
    """The node's wiring; None when it did not report one, or one that this version can't read."""
    return None if report.gpus is None else report.gpus.wiring
