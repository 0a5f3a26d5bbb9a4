"""Reads the tables of nccl-tests and rccl-tests, as people post them: old and new, prefixed, cut, failed.

What cannot be trusted is never read as a good number: each table has a status, and only ``ok`` means that its
figures may be used. Figures are those of the table itself (out-of-place; GB/s are decimal).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from clusterrun.measure import nccl_lines as lines
from clusterrun.measure.nccl_lines import Columns

# Differences above this are wrong results where only a difference is printed and no footer judges (NCCL 1 and
# nccl-tests before 2.13): sums of half precision over many ranks differ by less.
_TOLERANCE = 1e-2


class Status(Enum):
    """What became of a test; the first that holds."""

    CRASHED = "crashed"  # the run ended with an error
    WRONG = "wrong"  # results were checked and are wrong
    WRONG_COLLECTIVE = "wrong_collective"  # a good table, of another collective than asked for
    NO_ROWS = "no_rows"
    TRUNCATED = "truncated"  # the table ends before its last row
    OK = "ok"


@dataclass(frozen=True)
class Result:
    """One half of a row. ``wrong``: elements that are wrong, or the difference in old formats; None: not checked."""

    time_us: float
    algbw: float  # GB/s
    busbw: float  # GB/s
    wrong: float | None


@dataclass(frozen=True)
class Row:
    size: int  # bytes
    count: int | None
    type: str | None
    op: str | None
    out_of_place: Result
    in_place: Result | None


@dataclass(frozen=True)
class Table:
    """One test.

    Attributes:
        collective: as nccl-tests names it (all_reduce, all_gather, alltoall, ...), or None when nothing tells.
        ranks: from the devices, NCCL's log, or the ratio of busbw to algbw; None when nothing tells.
        nodes, per_node: hosts and ranks on each, when they can be told.
        gpu: name of the GPUs, when all are the same.
        avg_busbw: the footer's, GB/s; None without one.
        checked: False when the results were not checked.
        notes: what a reader should know, one phrase each.
    """

    collective: str | None
    ranks: int | None
    nodes: int | None
    per_node: int | None
    gpu: str | None
    nccl: str | None
    status: Status
    rows: tuple[Row, ...]
    avg_busbw: float | None
    checked: bool
    notes: tuple[str, ...]

    @property
    def peak(self) -> Row | None:
        """The row with the largest busbw out of place; None when none is above 0."""
        best = max(self.rows, key=lambda row: row.out_of_place.busbw, default=None)
        return best if best is not None and best.out_of_place.busbw > 0 else None

    def as_json(self) -> dict[str, Any]:
        peak = self.peak
        inside = max((row for row in self.rows if row.in_place), key=_in_place, default=None)
        return {
            "collective": self.collective,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "gpus_per_node": self.per_node,
            "gpu": self.gpu,
            "nccl": self.nccl,
            "status": self.status.value,
            "checked": self.checked,
            "peak_busbw": peak.out_of_place.busbw if peak else 0.0 if self.rows else None,
            "peak_size": peak.size if peak else None,
            "peak_busbw_in_place": _in_place(inside) if inside else None,
            "peak_size_in_place": inside.size if inside and _in_place(inside) > 0 else None,
            "avg_busbw": self.avg_busbw,
            "rows": len(self.rows),
            "notes": list(self.notes),
        }


def _in_place(row: Row) -> float:
    return row.in_place.busbw if row.in_place else 0.0


def read(text: str, expected: str = "all_reduce") -> list[Table]:
    """Every table of a file, in order. A file without any gives one, with status ``no_rows`` or ``crashed``.

    Args:
        text: what the program printed, or what became of it.
        expected: the collective that is asked for; a table of another has status ``wrong_collective``.
    """
    labelled = [lines.clean(line) for line in text.splitlines()]
    # Several ranks that each print a table of their own (a program built without MPI): one stream for each label.
    talkers = Counter(label for label, line in labelled if label is not None and lines.cells(line, _today()))
    streams = list(talkers) if len(talkers) > 1 else [None]
    tables: list[Table] = []
    for stream in streams:
        reader = _Reader(expected)
        for label, line in labelled:
            if stream is None or label == stream:
                reader.feed(line)
        tables += reader.tables()
    return tables


def _today() -> Columns:
    assert lines.TODAY is not None
    return lines.TODAY


@dataclass
class _Draft:
    """A test while its lines come."""

    columns: Columns | None = None
    program: str | None = None
    rows: list[Row] = field(default_factory=list)
    devices: dict[int, tuple[str, int, str]] = field(default_factory=dict)  # rank -> host, device, GPU
    nranks: int | None = None  # from NCCL's log
    largest: tuple[int, int, bool] | None = None
    nccl: str | None = None
    failed: int | None = None  # elements, of the footer
    footer: bool = False
    avg: float | None = None
    fatal: str | None = None
    pending: list[str] | None = None  # cells of a row that was cut
    damaged: int = 0
    elided: bool = False
    starred: bool = False

    @property
    def begun(self) -> bool:
        return bool(self.rows or self.pending or self.footer or self.fatal)


class _Reader:
    def __init__(self, expected: str) -> None:
        self.expected = expected
        self.drafts = [_Draft()]

    def feed(self, line: str) -> None:
        if self._meta(line) or not line.strip():
            return
        draft = self.drafts[-1]
        columns = draft.columns or _today()
        if draft.pending:
            joined = [*draft.pending, *lines.continuation(line)]
            if len(joined) in (columns.width, columns.width - 1) and len(joined) > len(draft.pending):
                if len(joined) < columns.width:
                    joined.insert(columns.names.index("root"), "-1")
                draft.pending = None
                self._row(draft, joined, columns)
                return
        found = lines.cells(line, columns)
        if found is None:
            draft.elided |= line.strip() == "..."
        elif draft.columns is not None or len(found) == columns.width:
            self._take(found, columns)

    def _take(self, found: list[str], columns: Columns) -> None:
        draft = self._current(draft_done=self.drafts[-1].footer)
        if draft.pending:
            draft.damaged += 1
            draft.pending = None
        if len(found) < columns.width:
            draft.pending = found
        else:
            self._row(draft, found, columns)

    def _row(self, draft: _Draft, found: list[str], columns: Columns) -> None:
        named = dict(zip(columns.names, found, strict=False))
        draft.starred |= any(cell.endswith("*") for cell in found)
        halves = [_result(found, group, columns.milliseconds) for group in columns.groups]
        if halves[0] is None:
            draft.damaged += 1
            return
        size = int(named.get("size") or named["bytes"])
        count = named.get("count") or named.get("N")
        draft.rows.append(
            Row(
                size,
                int(count) if count else None,
                named.get("type"),
                named.get("redop") or named.get("op"),
                halves[0],
                halves[1] if len(halves) > 1 else None,
            )
        )

    def _current(self, *, draft_done: bool) -> _Draft:
        """The test that this line belongs to: a new one when the last is over."""
        if draft_done:
            last = self.drafts[-1]
            self.drafts.append(_Draft(columns=last.columns, program=last.program, nccl=last.nccl))
        return self.drafts[-1]

    def _meta(self, line: str) -> bool:
        """Lines around the rows. True when the line is used up."""
        if lines.starting(line) or lines.banner(line):
            self._current(draft_done=self.drafts[-1].begun)
        columns = lines.header(line)
        if columns:
            draft = self._current(draft_done=self.drafts[-1].begun)
            draft.columns = columns
            return True
        name = lines.program(line)
        if name and lines.concluded(line):
            self.drafts[-1].program = name
            return True
        if name:
            self._current(draft_done=self.drafts[-1].begun and not lines.fatal(line)).program = name
        draft = self.drafts[-1]
        draft.largest = lines.banner(line) or draft.largest
        draft.nccl = lines.version(line) or draft.nccl
        smaller = lines.reduced(line)
        if smaller and draft.largest:
            draft.largest = (smaller, *draft.largest[1:])
        device = lines.device(line)
        if device:
            draft.devices[device[0]] = device[1:]
            return True
        member = lines.communicator(line)
        if member:
            draft.nranks = member[2]
            draft.devices.setdefault(member[1], (member[0], member[3], ""))
        bounds, average = lines.out_of_bounds(line), lines.average(line)
        if bounds:
            draft.failed, draft.footer = (max(bounds[0], 1) if bounds[1] else 0), True
        if average is not None:
            draft.avg, draft.footer = average, True
        draft.fatal = draft.fatal or lines.fatal(line)
        return bool(bounds or average is not None or line.lstrip().startswith("#"))

    def tables(self) -> list[Table]:
        kept = [draft for draft in self.drafts if draft.begun or draft.columns]
        return [_table(draft, self.expected) for draft in kept or self.drafts[-1:]]


def _result(found: list[str], group: tuple[int, int, int, int], milliseconds: bool) -> Result | None:
    time, algbw, busbw = (lines.number(found[at]) for at in group[:3])
    if time is None or algbw is None or busbw is None:
        return None
    check = lines.number(found[group[3]]) if group[3] >= 0 else None
    return Result(time * 1000 if milliseconds else time, algbw, busbw, check)


def _table(draft: _Draft, expected: str) -> Table:
    notes: list[str] = []
    count = _wrong(draft)
    checks = [half.wrong for row in draft.rows for half in (row.out_of_place, row.in_place) if half]
    checked = any(check is not None for check in checks)
    ranks = _ranks(draft)
    collective = draft.program or _guess(draft)
    cut = _cut(draft)
    if draft.fatal:
        status = Status.CRASHED
        notes.append(draft.fatal)
    elif count:
        status = Status.WRONG
        notes.append(count)
    elif draft.rows and collective not in (None, expected):
        status = Status.WRONG_COLLECTIVE
        notes.append(f"this is {collective}, not {expected}")
    elif not draft.rows:
        status = Status.NO_ROWS
    elif cut:
        status = Status.TRUNCATED
        notes.append(cut)
    else:
        status = Status.OK
    if draft.rows and not draft.footer:
        notes.append("no footer")
    if draft.rows and not checked:
        notes.append("results were not checked")
    if draft.elided:
        notes.append("rows were left out")
    if draft.damaged:
        notes.append(f"{draft.damaged} damaged row(s) skipped")
    nodes, per_node = _hosts(draft, ranks)
    gpus = {gpu for _, _, gpu in draft.devices.values() if gpu}
    return Table(
        collective,
        ranks,
        nodes,
        per_node,
        gpus.pop() if len(gpus) == 1 else None,
        draft.nccl,
        status,
        tuple(draft.rows),
        draft.avg,
        checked,
        tuple(notes),
    )


def _wrong(draft: _Draft) -> str:
    """In words, when results are wrong."""
    if draft.failed:
        return f"{draft.failed} values out of bounds"
    difference = draft.columns is not None and draft.columns.check in ("error", "res")
    judged = draft.failed is not None  # a footer that says OK knows the tolerance of each type
    for row in draft.rows:
        for half in (row.out_of_place, row.in_place):
            check = half.wrong if half else None
            if check is None:
                continue
            bad = check > _TOLERANCE and not judged if difference else check > 0
            if bad or not math.isfinite(check):
                return f"{check:g} {'difference' if difference else 'wrong elements'} at {row.size} bytes"
    return "a difference is marked with *" if draft.starred else ""


def _cut(draft: _Draft) -> str:
    """Why the table is not whole, or ''."""
    if draft.footer:
        return ""
    if draft.pending:
        return "the last row is cut"
    if draft.largest and draft.rows:
        largest, step, factor = draft.largest
        last = draft.rows[-1].size
        following = last * step if factor else last + step
        if following <= largest and following > last:
            return f"ends at {last} of {largest} bytes"
    return ""


def _ratio(draft: _Draft) -> float | None:
    """busbw / algbw of the row that tells it best."""
    best = max((row.out_of_place for row in draft.rows), key=lambda half: half.busbw, default=None)
    return best.busbw / best.algbw if best and best.algbw > 0 and best.busbw > 0 else None


def _guess(draft: _Draft) -> str | None:
    """The collective of a table that does not name it: by operation, ratio and the column of checks."""
    ratio = _ratio(draft)
    if not draft.rows:
        return None
    op = draft.rows[0].op
    if op is None and ratio is not None:
        return "all_gather" if ratio < 0.97 else "all_reduce"
    if op == "none":
        first = draft.rows[0]
        only_out = first.out_of_place.wrong is not None and first.in_place is not None and first.in_place.wrong is None
        if only_out:
            return "alltoall"  # the only test that never checks in place
        return "broadcast" if ratio is not None and ratio > 0.9995 else "all_gather"
    return "reduce_scatter" if ratio is not None and ratio < 0.97 else "all_reduce"


def _ranks(draft: _Draft) -> int | None:
    """Devices count at least as many ranks as they list; the ratio of busbw to algbw tells the rest."""
    listed = max(draft.devices, default=-1) + 1
    if draft.nranks:
        return max(draft.nranks, listed)
    ratio, collective = _ratio(draft), draft.program or _guess(draft)
    if ratio is not None and collective in ("all_reduce", "all_gather", "reduce_scatter", "alltoall"):
        missing = 1 - ratio / (2 if collective == "all_reduce" else 1)
        if missing > 1e-4:
            computed = round(1 / missing)
            # Two decimals tell up to some hundred ranks; beyond, the list of devices knows better.
            if computed >= 2 and (computed > 1.1 * listed or listed == 0):
                return computed
    return listed or None


def _hosts(draft: _Draft, ranks: int | None) -> tuple[int | None, int | None]:
    """Nodes and ranks on each. Only when the devices tell: all of them, or the largest device number of a host."""
    if not draft.devices or not ranks:
        return None, None
    hosts = Counter(host for host, _, _ in draft.devices.values())
    if len(draft.devices) == ranks:
        same = len(set(hosts.values())) == 1
        return len(hosts), hosts.most_common(1)[0][1] if same else None
    per_node = max(device for _, device, _ in draft.devices.values()) + 1
    return (ranks // per_node, per_node) if ranks % per_node == 0 else (None, None)
