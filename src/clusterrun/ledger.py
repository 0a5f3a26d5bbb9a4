"""The ledger of a run: why each attempt started, on which nodes, what it saved, how it ended.

One writer (the conductor), append-only: for each attempt ``start``, ``nodes`` when it begins to train, ``end``, and a
``notice`` for whatever a person should know of it (a straggler, a hang). An attempt without an end was killed; nobody
needs to have been there to write that down.
"""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from clusterrun.rundir import read_json_lines


class Ending(Enum):
    """How an attempt ended."""

    done = "done"
    preempted = "preempted"  # the scheduler wants the nodes back
    time_limit = "time_limit"
    requeued = "requeued"  # by Slurm or a person (scontrol requeue), before the conductor came to it
    stopped = "stopped"  # told to stop by a signal of unknown origin
    cancelled = "cancelled"  # by the user
    user_code_failed = "user_code_failed"
    crashed = "crashed"  # a worker died of a signal, or an error of the machinery (network, GPU, file system)
    node_lost = "node_lost"
    hung = "hung"  # no step for too long; ended by the watchdog
    preflight_refused = "preflight_refused"
    not_enough_nodes = "not_enough_nodes"
    internal_error = "internal_error"
    killed = "killed"  # no end was written


@dataclass(frozen=True)
class Notice:
    """Something to know of an attempt that did not end it by itself, e.g. a straggler. ``kind`` is one word."""

    time: float  # unix time
    kind: str
    message: str
    node: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Attempt:
    """One line of the story. ``saved_*`` are steps of the newest checkpoint, None where there was none."""

    number: int
    started: float  # unix time
    reason: str
    job_id: str
    queued_since: float | None = None  # unix time; None for a restart inside the allocation, or when nobody knows
    nodes: tuple[str, ...] = ()
    chosen: float | None = None  # unix time at which preflight had chosen the nodes
    saved_before: int | None = None
    saved_after: int | None = None
    ended: float | None = None
    ending: Ending = Ending.killed
    exit_code: int | None = None  # of the run, when this attempt was its last
    progressed: bool = False  # the workers said so themselves (scripts keep checkpoints of their own)
    message: str = ""
    error: str | None = None  # what went wrong, without what differs from one time to the next
    step: int | None = None  # the step at which it went wrong
    notices: tuple[Notice, ...] = ()

    @property
    def is_open(self) -> bool:
        return self.ended is None


STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


@dataclass
class Ledger:
    path: Path
    patience_s: float = 600.0  # with storage that is full or failing

    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first, read afresh."""
        found: dict[int, dict[str, Any]] = {}
        for record in read_json_lines(self.path):
            entry = found.setdefault(record["attempt"], {"notices": []})
            if record.get("event") == "notice":
                entry["notices"].append(record)
            else:
                entry.update(record)
        return [_attempt(entry) for _, entry in sorted(found.items()) if "started" in entry]

    def start(self, *, reason: str, job_id: str, saved_before: int | None, queued_since: float | None = None) -> int:
        """Open the next attempt and return its number (from 1)."""
        number = max((attempt.number for attempt in self.attempts()), default=0) + 1
        self._append(
            attempt=number,
            event="start",
            started=time.time(),
            reason=reason,
            job_id=job_id,
            saved_before=saved_before,
            queued_since=queued_since,
        )
        return number

    def chose(self, number: int, nodes: list[str]) -> None:
        """Preflight is over; these nodes train."""
        self._append(attempt=number, event="nodes", nodes=nodes, chosen=time.time())

    def notice(self, number: int, kind: str, message: str, *, node: str | None = None, rank: int | None = None) -> None:
        self._append(attempt=number, event="notice", time=time.time(), kind=kind, message=message, node=node, rank=rank)

    def end(
        self,
        number: int,
        ending: Ending,
        *,
        saved_after: int | None,
        exit_code: int | None = None,
        progressed: bool = False,
        message: str = "",
        error: str | None = None,
        step: int | None = None,
    ) -> None:
        self._append(
            attempt=number,
            event="end",
            ended=time.time(),
            ending=ending.value,
            saved_after=saved_after,
            exit_code=exit_code,
            progressed=progressed,
            message=message,
            error=error,
            step=step,
        )

    def same_error_again(self) -> bool:
        """Whether the last two attempts ended with the same error at the same step: it would only happen once more."""
        last = self.attempts()[-2:]
        if len(last) < 2 or last[0].exit_code is not None:
            return False
        return (
            last[0].error is not None
            and last[0].step is not None
            and ((last[0].error, last[0].step) == (last[1].error, last[1].step))
        )

    def stalled(self, saved_now: int | None) -> int:
        """How many of the newest attempts in a row left no newer checkpoint than they found.

        ``saved_now`` is the newest checkpoint on disk: it tells what a killed attempt saved, since that one wrote no
        end. Attempts that never got to train (refused by preflight, cancelled) are passed over.
        """
        count = 0
        saved_later = saved_now
        for attempt in reversed(self.attempts()):
            if attempt.exit_code is not None:
                break  # the run had ended; a person started it again and gave it a new budget
            after = saved_later if attempt.is_open else attempt.saved_after
            saved_later = attempt.saved_before
            if attempt.ending in (Ending.preflight_refused, Ending.not_enough_nodes, Ending.cancelled):
                continue
            newer = after is not None and (attempt.saved_before is None or after > attempt.saved_before)
            if newer or attempt.progressed:
                break
            count += 1
        return count

    def _append(self, **record: Any) -> None:
        """Add a line. Storage that is full or failing is given time: a run must not end because of its diary."""
        end = time.monotonic() + self.patience_s
        while True:
            try:
                return self._append_once(record)
            except OSError as error:
                if error.errno not in STORAGE_ERRORS or time.monotonic() > end:
                    raise
            time.sleep(1.0)

    def _append_once(self, record: dict[str, Any]) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            line = json.dumps(record) + "\n"
            data = (line if self._ends_clean() else "\n" + line).encode()
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _ends_clean(self) -> bool:
        """Whether the file ends with a whole line; a crash of the host may have cut the last one."""
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return True
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def _attempt(entry: dict[str, Any]) -> Attempt:
    return Attempt(
        number=entry["attempt"],
        started=entry["started"],
        reason=entry.get("reason", ""),
        job_id=entry.get("job_id", ""),
        queued_since=entry.get("queued_since"),
        chosen=entry.get("chosen"),
        nodes=tuple(entry.get("nodes", ())),
        saved_before=entry.get("saved_before"),
        saved_after=entry.get("saved_after"),
        ended=entry.get("ended"),
        ending=Ending(entry.get("ending", "killed")),
        exit_code=entry.get("exit_code"),
        progressed=entry.get("progressed", False),
        message=entry.get("message", ""),
        error=entry.get("error"),
        step=entry.get("step"),
        notices=tuple(_notice(record) for record in entry["notices"]),
    )


def _notice(record: dict[str, Any]) -> Notice:
    return Notice(record["time"], record["kind"], record["message"], record.get("node"), record.get("rank"))
