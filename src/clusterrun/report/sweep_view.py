"""A sweep as a person sees it: a table after submission, a live one while it runs, plain lines where no terminal is."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clusterrun.errors import ExitCode
from clusterrun.ledger import Attempt, Ledger
from clusterrun.report.events import EventTail
from clusterrun.report.events import Progress as RunProgress
from clusterrun.report.follow import detail
from clusterrun.report.wide import print_wide
from clusterrun.rundir import RunDir

_POLL_S = 0.5
_STATE_EVERY_S = 2.0
_LAST_WORDS_S = 10.0  # a job that ended may have written its last lines on another host a moment ago
_MOST_ROWS = 60  # more points are shown by their arrays

_STYLES = {"done": "green", "running": "cyan", "failed": "bold red", "refused": "bold red", "cancelled": "yellow"}


@dataclass(frozen=True)
class Row:
    """One point in a table."""

    name: str  # what tells it from the others, e.g. cluster.nodes=2
    run_id: str
    job: str  # job id, or in a word why there is none
    resources: tuple[str, str, str]  # nodes x workers, GPUs and CPU cores per node
    starts: str | None = None
    error: str | None = None


def show_submitted(rows: Sequence[Row], console: Console) -> None:
    """Point, run, job, resources and expected start; array by array when there are very many."""
    starts = any(row.starts for row in rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("point", "run", "job", "nodes x workers", "GPUs", "CPUs", *(["expected start"] if starts else []))
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows if len(rows) <= _MOST_ROWS else _by_array(rows):
        cells = (row.name, row.run_id, row.job, *row.resources, *([row.starts or "unknown"] if starts else []))
        table.add_row(*map(Text, cells))
    print_wide(console, table)
    for error, count in Counter(row.error for row in rows if row.error).items():
        console.print(f"{count} point{'s' if count > 1 else ''} not submitted: {error}", markup=False, soft_wrap=True)


def _by_array(rows: Sequence[Row]) -> list[Row]:
    """One row for all points of an array."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.job.partition("_")[0], *row.resources), []).append(row)
    return [
        replace(members[0], name=f"{len(members)} points", run_id=f"{members[0].run_id} ...", job=key[0])
        for key, members in groups.items()
    ]


@dataclass
class Watched:
    """One point while it is followed. ``attempts_before``: of earlier submissions, whose endings are old news."""

    name: str
    run: RunDir
    job_id: str | None
    attempts_before: int
    ended: bool = False
    word: str = "waiting"
    exit_code: int | None = None
    message: str = ""
    progress: RunProgress = field(default_factory=RunProgress)
    gone_since: float | None = None

    def __post_init__(self) -> None:
        self.tail = EventTail(self.run)

    def look(self, state: str | None, reason: str, now: float) -> None:
        """Take in what its ledger, its events and the scheduler (``state``, None when there is no job yet) say."""
        attempts = Ledger(self.run.ledger).attempts()
        current = attempts[-1] if len(attempts) > self.attempts_before else None
        if current is not None:
            for record in self.tail.new():
                self.progress.take(record)
        if current is not None and current.exit_code is not None:
            self._end(current.exit_code, current.ending.value, current.message)
        elif state == "ended":
            self.gone_since = self.gone_since or now
            if now - self.gone_since > _LAST_WORDS_S:
                self._end(int(ExitCode.USER_CODE_FAILED), "failed", "the job ended without a word in its ledger")
        else:
            self.gone_since = None
            self.word = _word(current, state, reason)

    def refuse(self, message: str, code: int = int(ExitCode.BAD_CONFIG)) -> None:
        """It won't run."""
        self._end(code, "not started", message)

    def _end(self, code: int, word: str, message: str) -> None:
        self.ended, self.exit_code, self.message = True, code, message
        self.word = "failed" if code not in (ExitCode.DONE, ExitCode.CANCELLED) else word


def _word(current: Attempt | None, state: str | None, reason: str) -> str:
    if state is None:
        return "waiting"
    if current is None:
        return f"queued ({reason})" if state == "pending" and reason not in ("", "None") else "queued"
    if current.ended is not None:
        return f"queued again ({current.ending.value})"
    return "running" if current.nodes else "preflight"


States = Callable[[], Mapping[str, tuple[str, str]]]  # job id -> ("pending" | "running" | "ended" | "unknown", reason)


def follow_sweep(points: Sequence[Watched], tick: Callable[[], None], states: States, console: Console) -> None:
    """Show how the points go until all have ended. ``tick`` drives what runs on this machine, and may set ``job_id``.

    Raises:
        KeyboardInterrupt: Ctrl-C; the caller decides what that means.
    """
    live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
    said: set[str] = set()
    last_state = -_STATE_EVERY_S
    known: Mapping[str, tuple[str, str]] = {}
    with live or _Nothing():
        while True:
            tick()
            now = time.monotonic()
            if now - last_state > _STATE_EVERY_S:
                known, last_state = states(), now
            for point in points:
                if not point.ended:
                    state, reason = known.get(point.job_id or "", (None, ""))
                    point.look(state, reason, now)
                if point.ended and point.run.id not in said and live is None:
                    said.add(point.run.id)
                    console.print(f"{point.name}: {_end_of(point)}", highlight=False, markup=False, soft_wrap=True)
            if live is not None:
                live.update(_table(points, console.height - 4), refresh=True)
            if all(point.ended for point in points):
                return
            time.sleep(_POLL_S)


def _end_of(point: Watched) -> str:
    p = point.progress
    result = f", {p.metric} {p.value:.4f}" if p.metric and p.value is not None else ""
    speed = f", {p.samples_per_s:,.0f} samples/s" if p.samples_per_s else ""
    return f"{point.word}{result}{speed}" + (f": {point.message}" if point.message else "")


def _table(points: Sequence[Watched], most: int) -> Table:
    counts = Counter(point.word.partition(" (")[0] for point in points)
    title = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    table = Table(box=None, pad_edge=False, header_style="bold", title=Text(title), title_justify="left")
    for column in ("point", "run", "state", "progress"):
        table.add_column(column, no_wrap=True)
    # What moves or is wrong first; the rest as far as there is room.
    order = sorted(points, key=lambda p: (p.ended and p.word == "done", p.word.startswith(("queued", "waiting"))))
    for point in order[: max(3, most)]:
        shown = point.message if point.word == "failed" else detail(point.progress)
        style = _STYLES.get(point.word, "")
        table.add_row(Text(point.name), Text(point.run.id), Text(point.word, style=style), Text(shown))
    if len(order) > max(3, most):
        table.add_row(Text(f"... {len(order) - max(3, most)} more", style="dim"))
    return table


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def ended_text(points: Sequence[Watched], sweep: str) -> list[str]:
    """The last lines of a followed sweep."""
    counts = Counter(point.word for point in points)
    lines = [f"{sweep}: " + ", ".join(f"{count} {word}" for word, count in counts.most_common())]
    for point in (p for p in points if p.word != "done"):
        lines.append(f"  {point.name}: {_end_of(point)}")
        lines.append(f"    {point.run.root}")
    lines.append(f"  clusterrun report {sweep}")
    return lines


def to_json(rows: Sequence[Row], sweep: str, directory: str) -> str:
    """The table after submission, for machines."""
    points = [{"point": r.name, "run": r.run_id, "job": r.job, "starts": r.starts, "error": r.error} for r in rows]
    return json.dumps({"sweep": sweep, "directory": directory, "points": points}, indent=1)
