"""Everything a report says of a run, read from its directory alone: no scheduler is asked, nothing is guessed."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from clusterrun.config import frozen
from clusterrun.config.schema import RunConfig
from clusterrun.ledger import Attempt, Ledger
from clusterrun.measure import groups
from clusterrun.measure.results import MEASURED, Row
from clusterrun.preflight.report import NodeReport
from clusterrun.report.events import EventTail
from clusterrun.report.goodput import Account, account_of
from clusterrun.report.preflight_view import NodeResult, read_results
from clusterrun.report.units import duration_text
from clusterrun.rundir import RUNS, RunDir, read_json_lines
from clusterrun.topology.model import Topology

_QUIET_S = 120.0  # an open attempt whose events are older than this is taken for dead when nobody can be asked


@dataclass(frozen=True)
class RunFacts:
    """One run.

    Attributes:
        events: rank 0's records of all attempts, in order, each with its ``attempt``.
        preflight: of the last attempt that had one; ``topologies`` likewise, by node.
    """

    run: RunDir
    config: RunConfig
    plan: Mapping[str, Any]
    attempts: Sequence[Attempt]
    events: Sequence[Mapping[str, Any]]
    preflight: Sequence[NodeResult]
    topologies: Mapping[str, Topology]
    interfaces: Mapping[str, tuple[str, int | None]]  # by node: the one to the other nodes, and its Mbit/s

    @cached_property
    def account(self) -> Account:
        """Where the time went; a run that is under way lasts until now."""
        last = max([float(e["t"]) for e in self.events], default=0.0)
        lives = bool(self.attempts) and self.attempts[-1].is_open and time.time() - last < _QUIET_S
        return account_of(self.attempts, self.events, now=time.time() if lives else None)

    @property
    def state(self) -> str:
        """In one word: not started, under way, or how the last attempt ended."""
        if not self.attempts:
            return "not started"
        last = self.attempts[-1]
        if not last.is_open:
            return last.ending.value.replace("_", " ")
        newest = max([last.started, *(float(e["t"]) for e in self.events)])
        return "under way" if time.time() - newest < _QUIET_S else "no end was written"

    @cached_property
    def steps(self) -> list[Mapping[str, Any]]:
        """Logged steps in order; of a step that was repeated after a fault, the one that counts: the later."""
        found = {e["step"]: e for e in self.events if e["kind"] == "step"}
        return [found[step] for step in sorted(found)]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [e for e in self.events if e["kind"] == kind]

    @property
    def start(self) -> Mapping[str, Any]:
        """What the last start said: world size, batch, parameters, device."""
        starts = self.of_kind("start")
        return starts[-1] if starts else {}

    @property
    def result(self) -> Mapping[str, Any]:
        """The last validation."""
        found = [e for e in self.events if e["kind"] in ("eval", "done")]
        return found[-1] if found else {}

    @cached_property
    def steady(self) -> list[Mapping[str, Any]]:
        """Logged steps without the first of each attempt, which warms up; all of them when there are few."""
        firsts: dict[int, int] = {}
        for e in self.steps:
            firsts.setdefault(e["attempt"], e["step"])
        kept = [e for e in self.steps if firsts[e["attempt"]] != e["step"]]
        return kept if len(kept) >= 3 else self.steps

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together: the median over steady steps."""
        return statistics.median(e["samples_per_s"] for e in self.steady) if self.steady else None

    @property
    def step_s(self) -> float | None:
        return statistics.median(e["step_time_s"] for e in self.steady) if self.steady else None

    @property
    def communication(self) -> float | None:
        """Share of a step in which gradients travel (rank 0; partly hidden behind computing), 0 to 1.

        None with one worker: DDP times something there too, but nothing travels.
        """
        return self._share("comm_time_s") if self.start.get("world_size", 2) > 1 else None

    @property
    def waiting(self) -> float | None:
        """Share of a step in which rank 0 waited for gradients: communication that computing did not hide, 0 to 1."""
        if self.start.get("world_size", 2) < 2:
            return None
        timed = [e for e in self.steady if e.get("own_time_s") is not None]
        whole = sum(e["step_time_s"] for e in timed)
        return 1 - sum(e["own_time_s"] for e in timed) / whole if timed and whole else None

    @property
    def data_wait(self) -> float | None:
        """Share of a step spent on getting the batch, 0 to 1."""
        return self._share("data_time_s")

    def _share(self, name: str) -> float | None:
        timed = [e for e in self.steady if e.get(name) is not None]
        whole = sum(e["step_time_s"] for e in timed)
        return min(1.0, sum(e[name] for e in timed) / whole) if timed and whole else None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those that trained last."""
        return next((a.nodes for a in reversed(self.attempts) if a.nodes), ())


def read_facts(run: RunDir) -> RunFacts:
    """Read a run. Raises RunError or ConfigError when it is not one."""
    run = RunDir.open(run.root)
    attempts = Ledger(run.ledger).attempts()
    try:
        plan = json.loads(run.plan.read_text())
    except (OSError, ValueError):
        plan = {}
    preflight: list[NodeResult] = []
    topologies: dict[str, Topology] = {}
    interfaces: dict[str, tuple[str, int | None]] = {}
    for attempt in reversed(attempts):
        directory = run.attempt(attempt.number)
        preflight = read_results(directory)
        if preflight:
            topologies, interfaces = _detected(directory.preflight)
            break
    return RunFacts(
        run, frozen.load(run.config), plan, attempts, EventTail(run).new(), preflight, topologies, interfaces
    )


def _detected(directory: Path) -> tuple[dict[str, Topology], dict[str, tuple[str, int | None]]]:
    found, interfaces = {}, {}
    for path in sorted(directory.glob("*.json")):
        value = json.loads(path.read_text()).get("report")
        report = NodeReport.from_json(value) if value else None
        if report is not None and report.gpus is not None and report.gpus.wiring is not None:
            found[path.stem] = report.gpus.wiring
        if report is not None and report.host_facts is not None and report.host_facts.interface:
            interfaces[path.stem] = report.host_facts.interface, report.host_facts.speed_mbit_s
    return found, interfaces


def busbw(run: RunDir, config: RunConfig) -> float | None:
    """Bytes per second of the largest all-reduce over all ranks, where that was measured."""
    row = measured_all_reduce(run, config, groups.ALL)
    return row.busbw if row else None


def measured_all_reduce(run: RunDir, config: RunConfig, phase: str) -> Row | None:
    """The largest all-reduce over the groups of a phase (``groups``), the slowest group's, where that was measured:

    by the run itself, or by the newest ``clusterrun bench`` of the same cluster, nodes and workers in the same
    shared directory. None: nobody measured it.
    """
    own = _largest_all_reduce(run, phase)
    if own is not None:
        return own
    wanted = (config.cluster.name, config.cluster.nodes, config.cluster.nproc_per_node)
    benches = sorted(
        (Path(config.cluster.shared_dir) / RUNS).glob("bench-*/config.yaml"), key=lambda p: p.stat().st_mtime
    )
    for path in reversed(benches):
        other = frozen.load(path).cluster
        if (other.name, other.nodes, other.nproc_per_node) == wanted:
            found = _largest_all_reduce(RunDir(path.parent), phase)
            if found is not None:
                return found
    return None


def _largest_all_reduce(run: RunDir, phase: str) -> Row | None:
    rows = [
        Row.from_json(record)
        for attempt in run.all_attempts()
        for path in attempt.event_files()
        for record in read_json_lines(path)
        if record.get("kind") == MEASURED
    ]
    fit = [row for row in rows if row.phase == phase and row.collective == "all_reduce"]
    return max(fit, key=lambda row: (row.bytes, row.seconds)) if fit else None


def code_text(run: RunDir) -> str:
    """Which code it was submitted with, in words; empty where nobody wrote that down."""
    try:
        about = json.loads(run.code.about.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    copied = ", trained from a copy" if run.code.tree.is_dir() else ""
    if not about.get("git"):
        return f"{about.get('directory')}, which is under no git{copied}"
    commit = f"commit {about['commit'][:10]} of branch {about['branch']}" if about.get("commit") else "no commit yet"
    changed = " with uncommitted changes" if about.get("diff") else ""
    untracked = f" and {len(about['untracked'])} untracked files" if about.get("untracked") else ""
    return f"{commit}{changed}{untracked}{copied}; {run.code.about.resolve().parent}"


def predicted(f: RunFacts) -> str:
    """What the plan predicted of a step, to stand beside what was measured; empty where it predicted nothing."""
    p = f.plan.get("prediction")
    if not isinstance(p, dict) or p.get("why_not") or not p.get("step_s"):
        return ""
    return f"{duration_text(p['step_s'])} per step, {p['share']:.0%} of it waiting for gradients ({p['bottleneck']})"
