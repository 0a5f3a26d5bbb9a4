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
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:  # cut by a crash, or still being written
            continue
        if isinstance(record, dict):
            yield record
