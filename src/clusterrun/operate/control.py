"""Cancel and requeue runs that live, and remove those that ended long ago."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterrun.config import frozen
from clusterrun.errors import RunError
from clusterrun.launch import jobs
from clusterrun.launch.jobs import Job
from clusterrun.operate.find import Found
from clusterrun.operate.status import RunState, RunStatus, status_of
from clusterrun.rundir import RunDir, SweepDir

_TRASH = ".trash-"


def cancel(found: Sequence[Found]) -> tuple[list[RunStatus], list[RunStatus]]:
    """Ask runs to save and end. Returns those that were asked, and those that live no more.

    Raises:
        RunError: the scheduler could not be asked, so nothing was done.
    """
    rows = status_of(found)
    _refuse_unknown(rows)
    living = [row for row in rows if row.state.lives]
    sent = [Job.of(RunDir(Path(row.path))) for row in living]
    jobs.cancel_all(sent)
    for job, row in zip(sent, living, strict=True):
        replace(job, cancelled=time.time()).write(RunDir(Path(row.path)))
    return living, [row for row in rows if not row.state.lives]


def requeue(found: Found) -> RunStatus:
    """Have a running run save, give its nodes back and queue again. Returns how it stood before.

    Raises:
        RunError: it does not run, or may not be requeued.
    """
    (row,) = status_of([found])
    _refuse_unknown([row])
    if row.state in (RunState.pending, RunState.requeued):
        raise RunError(f"{row.name}: is in the queue already ({row.why})")
    if not row.state.lives:
        raise RunError(
            f"{row.name}: {row.state.value}, so there is nothing to requeue; go on with it: resume {row.name}"
        )
    if not frozen.load(found.run.config).recovery.requeue:
        raise RunError(f"{row.name}: was submitted with recovery.requeue=false; cancel it, then: resume {row.name}")
    if row.attempts == 0:
        raise RunError(f"{row.name}: is only just starting; wait until it has begun")
    jobs.ask_to_requeue(Job.of(found.run))
    return row


def _refuse_unknown(rows: Sequence[RunStatus]) -> None:
    for row in rows:
        if row.state is RunState.unknown:
            raise RunError(f"{row.name}: can't tell whether it lives ({row.why})")


@dataclass(frozen=True)
class Removable:
    """A run that ended, and what it takes on the disk."""

    status: RunStatus
    found: Found
    bytes: int


def removable(found: Sequence[Found], older_than_s: float) -> list[Removable]:
    """Runs that surely live no more and ended so long ago, oldest first. One that can't be judged is not among them."""
    before = time.time() - older_than_s
    ended = []
    for one, row in zip(found, status_of(found), strict=True):
        sure = not row.state.lives and row.state not in (RunState.unknown, RunState.waiting)
        when = row.ended or row.submitted
        if sure and when is not None and when <= before and not one.run.root.is_symlink():
            ended.append(Removable(row, one, _bytes(one.run.root)))
    return sorted(ended, key=lambda r: r.status.ended or r.status.submitted or 0.0)


def remove(chosen: Sequence[Removable]) -> list[Found]:
    """Remove runs, each by a rename first, so that no half of one is ever found. Returns those that went.

    Each is looked at once more right before: somebody may have resumed it meanwhile.
    """
    gone = []
    still = status_of([r.found for r in chosen])
    for one, row in zip(chosen, still, strict=True):
        if row.state.lives or row.state is RunState.unknown or row.submitted != one.status.submitted:
            continue
        root = one.found.run.root
        aside = root.with_name(f"{_TRASH}{root.name}-{os.getpid()}")
        try:
            root.rename(aside)
        except FileNotFoundError:
            continue
        shutil.rmtree(aside, ignore_errors=True)
        gone.append(one.found)
    for sweep in {one.run.root.parent for one in gone if one.sweep}:
        if not any(sweep.glob("*/config.yaml")) and SweepDir(sweep).sweep.is_file():
            shutil.rmtree(sweep, ignore_errors=True)
    return gone


def _bytes(root: Path) -> int:
    """What the files below take, links not followed."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += _bytes(Path(entry.path))
            else:
                total += entry.stat(follow_symlinks=False).st_size
    return total
