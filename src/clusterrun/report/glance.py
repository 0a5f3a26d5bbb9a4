"""How far a run is, from the two ends of its newest events: fast however long it has run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clusterrun.ledger import Attempt
from clusterrun.report.events import EventTail, Progress
from clusterrun.report.goodput import account_of
from clusterrun.rundir import RunDir

_HEAD_BYTES = 8_192
_TAIL_BYTES = 32_768
_STEP = b'"kind": "step"'


def progress_of(run: RunDir, attempts: Sequence[Attempt]) -> Progress:
    """What the newest attempt with events says: its first records and its last. Empty for scripts, which write none."""
    progress = Progress()
    for attempt in reversed(attempts):
        files = run.attempt(attempt.number).event_files(0)
        if files:
            for record in _ends(files[-1]):
                progress.take(record)
            break
    return progress


def goodput_of(run: RunDir, attempts: Sequence[Attempt], lives: bool) -> float | None:
    """Percent of all time so far that went into training that counted; None before there is any."""
    if not attempts:
        return None
    return account_of(attempts, EventTail(run).new(), now=time.time() if lives else None).goodput_percent


def events_bytes(run: RunDir, attempts: Sequence[Attempt]) -> int:
    """How much there is to read for ``goodput_of``."""
    found = 0
    for attempt in attempts:
        for path in run.attempt(attempt.number).event_files(0):
            found += path.stat().st_size
    return found


def _ends(path: Path) -> Iterable[dict[str, Any]]:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        size = file.seek(0, 2)
        begin = max(len(head), size - _TAIL_BYTES)
        file.seek(begin)
        tail = file.read()
    yield from _records(head.rpartition(b"\n")[0] if begin > len(head) else head + tail)
    if begin > len(head):
        yield from _records(tail.partition(b"\n")[2])


def _records(data: bytes) -> Iterable[dict[str, Any]]:
    """Of the steps between two other records only the last: it says all that the ones before it did, and most are."""
    step = b""
    for line in data.split(b"\n"):
        if _STEP in line:
            step = line if line.endswith(b"}") else step  # the last may still be being written
            continue
        yield from _record(step)
        yield from _record(line)
        step = b""
    yield from _record(step)


def _record(line: bytes) -> Iterable[dict[str, Any]]:
    try:
        record = json.loads(line)
    except ValueError:  # cut by a crash, or still being written
        return
    if isinstance(record, dict):
        yield record
