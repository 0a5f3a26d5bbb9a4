"""How runs stand: from the run directory, one squeue for all of them, and one sacct for those that Slurm has forgotten.

Without sacct (a site that keeps no accounting) everything works but one thing: the cause of a job that was killed
before it could write down its end. The ledger is right about all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from clusterrun.checkpoint.store import Store
from clusterrun.errors import ExitCode, RunError
from clusterrun.launch import jobs, queue
from clusterrun.launch.jobs import Job, JobState, Seen
from clusterrun.launch.slurm_steps import expand_host_list
from clusterrun.launch.slurm_words import how_ended, why_pending
from clusterrun.ledger import Attempt, Ending, Ledger
from clusterrun.operate.find import Found
from clusterrun.report.events import Progress
from clusterrun.report.glance import events_bytes, goodput_of, progress_of
from clusterrun.rundir import RunDir

# Goodput reads all events of rank 0. Beyond so much in all it is left out, newest runs first, and said.
_GOODPUT_BYTES = 64 << 20


class RunState(Enum):
    """Where a run is, in one word."""

    waiting = "waiting"  # a point of a sweep whose turn has not come
    pending = "pending"
    running = "running"
    saving = "saving"  # a checkpoint is being written
    requeued = "requeued"  # stopped and saved, and in the queue again
    done = "done"
    failed = "failed"
    stopped = "stopped"  # ended before its last step without being at fault; `resume` goes on with it
    cancelled = "cancelled"
    unknown = "unknown"  # the scheduler could not be asked

    @property
    def lives(self) -> bool:
        return self in (RunState.pending, RunState.running, RunState.saving, RunState.requeued)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for. Of one that is unknown or waits its turn that can't be said."""
        return self in (RunState.done, RunState.failed, RunState.stopped, RunState.cancelled)


@dataclass(frozen=True)
class RunStatus:
    """One run at one moment. None where there is nothing to say (yet). Times are unix times in seconds."""

    id: str
    sweep: str | None
    path: str
    state: RunState
    why: str  # why it waits, what it does, or how it ended; in plain words
    executor: str | None
    job_id: str | None
    submitted: float | None
    ended: float | None
    expected_start: str | None  # as Slurm says it, local time
    attempts: int
    nodes: tuple[str, ...]  # of the newest attempt
    step: int | None
    total_steps: int | None
    loss: float | None
    metric: str | None
    value: float | None
    samples_per_s: float | None
    eta_s: float | None
    goodput_percent: float | None
    saved_step: int | None  # newest checkpoint
    exit_code: int | None

    @property
    def name(self) -> str:
        return f"{self.sweep}/{self.id}" if self.sweep else self.id

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value}


@dataclass(frozen=True)
class _Facts:
    """What the disk says of a run."""

    found: Found
    job: Job | None
    attempts: list[Attempt]
    problem: str | None = None  # its job.json can't be read

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def has_ended(self) -> bool:
        """By its own word, and it was not submitted once more since."""
        return self.last is not None and self.last.exit_code is not None and not self._submitted_since

    @property
    def _submitted_since(self) -> bool:
        return bool(self.job and self.last and self.last.ended and self.job.submitted > self.last.ended)


def status_of(found: Sequence[Found]) -> list[RunStatus]:
    """How each run stands, in the order given, but for goodput."""
    facts = [_facts(one) for one in found]
    seen = _ask([f for f in facts if f.job and not f.has_ended])
    gone = [f for f in facts if f.job and _needs_accounting(f, seen.get(f.job.run_dir))]
    accounts = queue.accounted(f.job.job_id for f in gone if f.job) if gone else {}
    states = [_stand(f, seen, accounts) for f in facts]
    return [_row(fact, state, why, seen) for fact, (state, why) in zip(facts, states, strict=True)]


def with_goodput(rows: Sequence[RunStatus]) -> list[RunStatus]:
    """The same rows with goodput, for which all events are read: for those that somebody looks at."""
    left, found = _GOODPUT_BYTES, []
    for row in rows:
        run = RunDir(Path(row.path))
        attempts = Ledger(run.ledger).attempts()
        left -= events_bytes(run, attempts)
        found.append(replace(row, goodput_percent=goodput_of(run, attempts, row.state.lives)) if left >= 0 else row)
    return found


def _facts(found: Found) -> _Facts:
    attempts = Ledger(found.run.ledger).attempts()
    try:
        return _Facts(found, Job.of(found.run), attempts)
    except RunError as error:
        return _Facts(found, None, attempts, str(error) if found.run.job.exists() else None)


def _ask(facts: Sequence[_Facts]) -> dict[str, Seen]:
    asked = [f.job for f in facts if f.job]
    return jobs.look(asked) if asked else {}


def _needs_accounting(facts: _Facts, seen: Seen | None) -> bool:
    """Only a job whose end nobody wrote down, and that squeue does not know (any more)."""
    if seen is None or seen.state is not JobState.ended or seen.entry is not None:
        return False
    return facts.job is not None and facts.job.executor == "slurm" and not facts.has_ended


def _stand(f: _Facts, seen: Mapping[str, Seen], accounts: Mapping[str, list[queue.Entry]]) -> tuple[RunState, str]:
    if f.problem:
        return RunState.unknown, f.problem
    if f.has_ended and f.last is not None:
        return _by_exit(f.last)
    if f.job is None:
        return (RunState.waiting, "its turn has not come") if not f.attempts else _by_ledger(f.attempts[-1], None)
    now = seen[f.job.run_dir]
    if now.state is JobState.unknown:
        return RunState.unknown, now.reason
    if now.state is JobState.pending:
        why = why_pending(now.reason)
        again = f.last is not None and f.last.exit_code is None
        if again and f.last is not None:
            return RunState.requeued, f"after {_ENDINGS.get(f.last.ending, f.last.ending.value)}; {why}"
        return RunState.pending, why
    if now.state is JobState.running:
        return _alive(f, now)
    accounted = [e for e in accounts.get(f.job.job_id, []) if e.name == f.job.name]
    entry = now.entry or (accounted[-1] if accounted else None)
    if (f.last is not None and f.last.job_id == f.job.job_id) or (f.last is not None and f.job.executor == "local"):
        return _by_ledger(f.last, entry)
    return _never_started(f.job, entry)


def _alive(f: _Facts, now: Seen) -> tuple[RunState, str]:
    last = f.last
    if now.entry is not None and now.entry.state in ("SUSPENDED", "STOPPED"):
        return RunState.running, "suspended by Slurm"
    if last is None or last.exit_code is not None:
        return RunState.running, "starting"
    if not last.is_open:
        return RunState.running, f"between two attempts, after {_ENDINGS.get(last.ending, last.ending.value)}"
    saving = Store(f.found.run.checkpoints).being_written(last.number)
    if saving is not None:
        return RunState.saving, f"step {saving}"
    if not last.nodes:
        return RunState.running, "preflight"
    before = f.attempts[-2].ending if len(f.attempts) > 1 else None
    return RunState.running, f"attempt {last.number}, after {_ENDINGS.get(before, before.value)}" if before else ""


_ENDINGS = {
    Ending.preempted: "preemption",
    Ending.time_limit: "the time limit",
    Ending.requeued: "a requeue",
    Ending.stopped: "a stop",
    Ending.cancelled: "a cancel",
    Ending.node_lost: "a lost node",
    Ending.user_code_failed: "a failure of your code",
    Ending.crashed: "a crash",
    Ending.hung: "a hang",
    Ending.killed: "a kill",
    Ending.preflight_refused: "preflight refused nodes",
    Ending.not_enough_nodes: "too few healthy nodes",
    Ending.internal_error: "an error of clusterrun",
}


def _by_exit(last: Attempt) -> tuple[RunState, str]:
    """A run that said itself how it ended."""
    if last.exit_code == ExitCode.DONE or last.ending is Ending.done:
        return RunState.done, ""
    if last.exit_code == ExitCode.CANCELLED or last.ending is Ending.cancelled:
        return RunState.cancelled, last.message
    if last.exit_code == ExitCode.REQUEUE:
        return RunState.stopped, f"{_ENDINGS.get(last.ending, last.ending.value)}: {last.message}"
    cause = _ENDINGS.get(last.ending, last.ending.value)
    return RunState.failed, f"{cause}: {last.message}" if last.message else cause


def _by_ledger(last: Attempt, entry: queue.Entry | None) -> tuple[RunState, str]:
    """Its job is gone, and the last attempt has no end, or one after which it should have come back."""
    if last.exit_code is not None:
        return _by_exit(last)
    if not last.is_open:
        cause = _ENDINGS.get(last.ending, last.ending.value)
        if entry is not None and entry.state == "CANCELLED":
            return RunState.cancelled, f"while it was in the queue again after {cause}"
        return RunState.stopped, f"it ended after {cause}, and is no longer in the queue"
    if entry is None:
        return RunState.failed, "it was killed before it could say why, and Slurm no longer knows the job"
    if entry.state == "CANCELLED":
        return RunState.cancelled, "it was killed before it could save"
    return RunState.failed, how_ended(entry.state, entry.exit_code)


def _never_started(job: Job, entry: queue.Entry | None) -> tuple[RunState, str]:
    if job.cancelled is not None or (entry is not None and entry.state == "CANCELLED"):
        return RunState.cancelled, "before it started"
    if entry is None:
        return RunState.failed, "it never started, and the scheduler no longer knows its job"
    return RunState.failed, f"it never started: {how_ended(entry.state, entry.exit_code)}"


def _row(f: _Facts, state: RunState, why: str, seen: Mapping[str, Seen]) -> RunStatus:
    progress = progress_of(f.found.run, f.attempts) if f.attempts else Progress()
    last, job = f.last, f.job
    entry = seen[job.run_dir].entry if job and job.run_dir in seen else None
    nodes = last.nodes if last else ()
    if not nodes and entry is not None and entry.nodes and entry.is_alive:
        nodes = tuple(expand_host_list(entry.nodes))
    moving = state in (RunState.running, RunState.saving)
    saved = last.saved_after if last and last.saved_after is not None else progress.saved_step
    return RunStatus(
        id=f.found.run.id,
        sweep=f.found.sweep,
        path=str(f.found.run.root),
        state=state,
        why=why,
        executor=job.executor if job else None,
        job_id=job.job_id if job else None,
        submitted=job.submitted if job else None,
        ended=last.ended if last and not state.lives else None,
        expected_start=(entry.start or None) if entry and entry.is_pending else None,
        attempts=len(f.attempts),
        nodes=nodes,
        step=progress.step or None,
        total_steps=progress.total_steps,
        loss=progress.loss,
        metric=progress.metric,
        value=progress.value,
        samples_per_s=progress.samples_per_s,
        eta_s=progress.eta_s if moving else None,
        goodput_percent=None,
        saved_step=saved if saved is not None else (last.saved_before if last else None),
        exit_code=last.exit_code if last and f.has_ended else None,
    )


def counts(rows: Sequence[RunStatus]) -> dict[str, int]:
    """How many runs are in each state, in the order of the states."""
    found = {state.value: sum(row.state is state for row in rows) for state in RunState}
    return {state: count for state, count in found.items() if count}
