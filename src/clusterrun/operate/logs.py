"""What went wrong in an attempt, once and not once per rank; and the output of ranks, also while it is written."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from clusterrun.errors import RunError
from clusterrun.ledger import Attempt, Ending, Ledger
from clusterrun.rundir import AttemptDir, RunDir, read_json_lines

_TRACE_LINES = 60  # of one error; what is longer loses its middle
_LAST_LINES = 25
_POLL_S = 0.5
_FILE = re.compile(r"(?P<node>.+?)\.(?P<rank>\d+)(?:\.r(?P<restart>\d+))?\.(?P<kind>out|err|error\.json)")
_NOT_AT_FAULT = (Ending.done, Ending.preempted, Ending.time_limit, Ending.requeued, Ending.stopped, Ending.cancelled)


@dataclass(frozen=True)
class LogFile:
    """Output of one rank: ``stream`` is out or err."""

    path: Path
    node: str
    rank: int
    restart: int
    stream: str

    @property
    def label(self) -> str:
        return f"{self.node} rank {self.rank}{f' restart {self.restart}' if self.restart else ''} {self.stream}"


@dataclass(frozen=True)
class RankError:
    """An error, and every rank that had the same."""

    message: str  # one line
    node: str | None
    rank: int | None
    time: float | None  # unix time
    text: str = ""  # traceback, or the end of what the rank printed
    log: Path | None = None
    ranks: tuple[int, ...] = field(default_factory=tuple)


def pick_attempt(run: RunDir, number: int | None) -> Attempt:
    """The attempt asked for; else the newest that failed; else the newest.

    Raises:
        RunError: there is none, or none of that number.
    """
    attempts = Ledger(run.ledger).attempts()
    if not attempts:
        raise RunError(f"{run.id}: has not started yet, so there are no logs; see: clusterrun status {run.id}")
    if number is not None:
        for attempt in attempts:
            if attempt.number == number:
                return attempt
        raise RunError(f"{run.id}: no attempt {number}; there are 1 to {attempts[-1].number}")
    failed = [a for a in attempts if not a.is_open and a.ending not in _NOT_AT_FAULT]
    if attempts[-1].is_open and not failed:
        return attempts[-1]
    return failed[-1] if failed else attempts[-1]


def log_files(attempt: AttemptDir, rank: int | None = None, node: str | None = None) -> list[LogFile]:
    """Output files by rank, standard error after standard output.

    Raises:
        RunError: no such rank or node, with what there is.
    """
    every = _files(attempt, ("out", "err"))
    found = [f for f in every if rank in (None, f.rank) and node in (None, f.node)]
    if not found and every:
        nodes = sorted({f.node for f in every})
        ranks = sorted({f.rank for f in every})
        raise RunError(f"attempt {attempt.number}: ranks {ranks[0]} to {ranks[-1]} on {', '.join(nodes)}; not this one")
    return found


def _files(attempt: AttemptDir, kinds: Sequence[str]) -> list[LogFile]:
    found = []
    for path in attempt.logs.glob("*"):
        match = _FILE.fullmatch(path.name)
        if match and match["kind"] in kinds:
            found.append(LogFile(path, match["node"], int(match["rank"]), int(match["restart"] or 0), match["kind"]))
    return sorted(found, key=lambda f: (f.rank, f.restart, kinds.index(f.stream)))


def errors_of(run: RunDir, attempt: Attempt) -> list[RankError]:
    """Every different error of an attempt, the earliest first; equal ones of several ranks once."""
    place = run.attempt(attempt.number)
    found = [*_from_error_files(place), *_from_events(place)]
    named = _from_ledger(place, attempt)
    if named is not None and not any(e.rank == named.rank for e in found):
        found.append(named)
    merged: dict[str, RankError] = {}
    for error in sorted(found, key=lambda e: (e.time is None, e.time or 0.0, e.rank or 0)):
        first = merged.setdefault(_same(error.message), error)
        if error.rank is not None and error.rank not in first.ranks:
            merged[_same(error.message)] = replace(first, ranks=(*first.ranks, error.rank))
    ordered = list(merged.values())
    if named is not None and named.rank is not None:  # the conductor weighed all of them, and chose the cause
        ordered.sort(key=lambda e: named.rank not in e.ranks)
    return ordered


def _same(message: str) -> str:
    """Two ranks' messages are the same when they differ only by numbers, addresses and host names' digits."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", message)


def _from_error_files(place: AttemptDir) -> list[RankError]:
    """Torch writes one for a worker that ended with an exception."""
    found = []
    for file in _files(place, ("error.json",)):
        try:
            said = json.loads(file.path.read_text())["message"]
            extra = said["extraInfo"] if isinstance(said, dict) else {}
            text, when = str(extra.get("py_callstack", "")), float(extra.get("timestamp") or 0) or None
            message = _first(said["message"] if isinstance(said, dict) else said)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        log = place.log(file.node, file.rank, file.restart, "err")
        found.append(RankError(message, file.node, file.rank, when, _shorten(text), log, (file.rank,)))
    return found


def _from_events(place: AttemptDir) -> list[RankError]:
    """A worker of ours writes an event of the error that ended it."""
    found = []
    for path in place.event_files():
        node = path.name.rsplit(".", 2)[0]
        for record in read_json_lines(path):
            if record.get("kind") == "error" and "rank" in record:
                rank, log = int(record["rank"]), place.log(node, int(record["rank"]), 0, "err")
                message = f"{record.get('type')}: {record.get('message')}".partition("\n")[0]
                found.append(RankError(message, node, rank, record.get("t"), _traceback(log), log, (rank,)))
    return found


def _from_ledger(place: AttemptDir, attempt: Attempt) -> RankError | None:
    """What the conductor wrote down, with the end of that rank's own output."""
    if not attempt.message:
        return None
    match = re.match(r"(?:(?P<node>[\w.-]+): )?rank (?P<rank>\d+): (?P<said>.*)", attempt.message, re.DOTALL)
    if not match:
        return RankError(attempt.message, None, None, attempt.ended)
    rank = int(match["rank"])
    logs = [f.path for f in _files(place, ("err",)) if f.rank == rank and match["node"] in (None, f.node)]
    log = logs[-1] if logs else None
    text = (_traceback(log) or _end(log)) if log else ""
    return RankError(match["said"], match["node"], rank, attempt.ended, text, log, (rank,))


def _first(text: object) -> str:
    return str(text).strip().partition("\n")[0]


def _traceback(log: Path) -> str:
    """The first traceback in a rank's standard error, without what follows it; "" when there is none."""
    lines = _lines(log)
    begin = next((i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), None)
    if begin is None:
        return ""
    end = len(lines)
    prefix = lines[begin].partition("Traceback")[0]  # "[rank3]: " as torch writes it
    for i in range(begin + 1, len(lines)):
        body = lines[i].removeprefix(prefix)
        if body and not body[0].isspace():  # the exception itself; or "During handling of ...", which goes on
            if any("Traceback (most recent call last)" in line for line in lines[i + 1 : i + 6]) and (
                "exception" in body or ":" in body
            ):
                continue
            end = i + 1
            break
    return _shorten("\n".join(line.removeprefix(prefix) for line in lines[begin:end]))


def _end(log: Path) -> str:
    return "\n".join(_lines(log)[-_LAST_LINES:])


def _lines(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").rstrip().splitlines()
    except OSError:
        return []


def _shorten(text: str) -> str:
    lines = text.rstrip().splitlines()
    if len(lines) > _TRACE_LINES:
        half = _TRACE_LINES // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} lines left out ...", *lines[-half:]]
    return "\n".join(lines)


def last_lines(files: Sequence[LogFile], count: int = _LAST_LINES) -> Iterator[tuple[LogFile, list[str]]]:
    """The end of each file that has anything in it."""
    for file in files:
        lines = _lines(file.path)
        if lines:
            yield file, lines[-count:]


def follow(
    files_now: Callable[[], Sequence[LogFile]], has_ended: Callable[[], bool], say: Callable[[LogFile, str], None]
) -> None:
    """Say each new line of the files, opened afresh each time as NFS needs it, until the run has ended."""
    offsets: dict[Path, int] = {}
    ask = 0.0
    while True:
        over = False
        if time.monotonic() - ask > 4 * _POLL_S:
            over, ask = has_ended(), time.monotonic()
        for file in files_now():
            _new_lines(file, offsets, say, over)
        if over:
            return
        time.sleep(_POLL_S)


def _new_lines(file: LogFile, offsets: dict[Path, int], say: Callable[[LogFile, str], None], over: bool) -> None:
    try:
        with file.path.open("rb") as stream:
            stream.seek(offsets.get(file.path, 0))
            data = stream.read()
    except FileNotFoundError:
        return
    whole = data if over else data[: data.rfind(b"\n") + 1]
    offsets[file.path] = offsets.get(file.path, 0) + len(whole)
    for line in whole.decode(errors="replace").splitlines():
        say(file, line)
