"""Following a run live: a progress bar on a terminal, plain lines elsewhere, a short summary at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from clusterrun.errors import ExitCode
from clusterrun.ledger import Attempt, Ledger
from clusterrun.report.events import EventTail
from clusterrun.report.events import Progress as RunProgress
from clusterrun.report.goodput import account_of, describe
from clusterrun.rundir import RunDir

_POLL_S = 0.2
_STATE_EVERY_S = 2.0
_PLAIN_EVERY_S = 5.0
_SAME_EVERY_S = 60.0
# A job that ended may have written its last lines on another host a moment ago.
_LAST_WORDS_S = 10.0
_ENDING_S = 5.0

StateOf = Callable[[], tuple[str, str]]  # ("pending" | "running" | "ended" | "unknown", reason)


@dataclass(frozen=True)
class Followed:
    """How a followed run ended."""

    exit_code: int
    message: str
    progress: RunProgress
    attempts: list[Attempt]
    seconds: float


def follow(run: RunDir, attempts_before: int, state_of: StateOf, console: Console) -> Followed:
    """Show progress until the run has ended. Returns what its ledger says, never a guess of its own.

    ``attempts_before``: attempts of earlier submissions, whose endings are old news.
    """
    begin = time.monotonic()
    tail, progress, ledger = EventTail(run), RunProgress(), Ledger(run.ledger)
    ended_at: float | None = None
    view = _bar(console) if console.is_terminal else None
    if view:
        view.start()
    task: TaskID | None = view.add_task("waiting", total=None, detail="") if view else None
    last_state = last_line = -_PLAIN_EVERY_S
    state, reason, said = "pending", "", ""
    try:
        while True:
            for record in tail.new():
                progress.take(record)
            attempts = ledger.attempts()
            current = attempts[-1] if len(attempts) > attempts_before else None
            if current is not None and current.exit_code is not None:
                _wait_until_ended(state_of)
                for record in tail.new():
                    progress.take(record)
                return Followed(current.exit_code, current.message, progress, attempts, time.monotonic() - begin)
            now = time.monotonic()
            if now - last_state > _STATE_EVERY_S:
                last_state = now
                state, reason = state_of()
            if state != "ended":
                ended_at = None
            elif ended_at is None:
                ended_at = now
            elif now - ended_at > _LAST_WORDS_S:
                message = f"the job ended without a word in its ledger; see {run.submitit}"
                return Followed(int(ExitCode.USER_CODE_FAILED), message, progress, attempts, now - begin)
            where = _phase(current, state, reason, progress)
            if view and task is not None:
                view.update(
                    task,
                    description=where,
                    total=progress.total_steps,
                    completed=progress.step,
                    detail=detail(progress),
                )
            elif now - last_line > _PLAIN_EVERY_S:
                line = f"{where}: {detail(progress) or '...'}"
                if line != said or now - last_line > _SAME_EVERY_S:
                    said, last_line = line, now
                    console.print(line, highlight=False, markup=False, soft_wrap=True)
            time.sleep(_POLL_S)
    finally:
        if view:
            view.stop()


def _wait_until_ended(state_of: StateOf) -> None:
    """The ledger ends a moment before the job does; who is told "done" should find nothing running."""
    end = time.monotonic() + _ENDING_S
    while state_of()[0] != "ended" and time.monotonic() < end:
        time.sleep(_POLL_S)


def detail(p: RunProgress) -> str:
    """step, loss, metric, samples/s, ETA in one line."""
    if not p.step:
        return p.measured
    parts = [f"step {p.step}/{p.total_steps}"]
    if p.loss is not None:
        parts.append(f"loss {p.loss:.4f}")
    if p.metric and p.value is not None:
        parts.append(f"{p.metric} {p.value:.4f}")
    if p.samples_per_s:
        parts.append(f"{p.samples_per_s:,.0f} samples/s")
    if p.eta_s is not None:
        parts.append(f"ETA {clock(p.eta_s)}")
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def summary(run: RunDir, f: Followed) -> list[str]:
    """A few lines for the end of a followed run."""
    p, last = f.progress, f.attempts[-1] if f.attempts else None
    word = last.ending.value if last and f.exit_code == (last.exit_code or 0) else f"exit {f.exit_code}"
    lines = [f"{run.id}: {word}" + (f", {p.metric} {p.value:.4f}" if p.metric and p.value is not None else "")]
    if f.message:
        lines.append(f"  {f.message}")
    if p.total_steps:
        loss = f", loss {p.loss:.6f}" if p.loss is not None else ""
        lines.append(
            f"  step {p.step} of {p.total_steps}{loss}, {clock(f.seconds)} in all, attempts: {len(f.attempts)}"
        )
    if p.world_size:
        lines.append(f"  world size {p.world_size}, batch {p.global_batch} ({p.batch_per_rank} per rank)")
    if p.saved_step is not None:
        lines.append(f"  newest checkpoint: step {p.saved_step} in {run.checkpoints}")
    lines += [f"  warning: {w}" for w in p.warnings[-3:]]
    if f.attempts:
        lines.append(f"  {describe(account_of(f.attempts, EventTail(run).new()))}")
    notices = [(attempt, notice) for attempt in f.attempts for notice in attempt.notices]
    lines += [f"  attempt {attempt.number}: {notice.message}" for attempt, notice in notices[-5:]]
    if f.exit_code not in (ExitCode.DONE, ExitCode.CANCELLED) and last:
        lines.append(f"  logs: {run.attempt(last.number).logs}")
    if f.exit_code in (ExitCode.CANCELLED, ExitCode.REQUEUE):
        lines.append(f"  go on with: clusterrun resume {run.root}")
    return lines


def nccl_summary(run: RunDir, f: Followed) -> list[str]:
    """What NCCL used in the last attempt that has logs of it."""
    written = [run.attempt(one.number) for one in f.attempts if run.attempt(one.number).nccl_logs()]
    if not written:
        return []
    from clusterrun.config import frozen
    from clusterrun.report.nccl_used import nccl_lines

    return [f"  {line}" for line in nccl_lines(written[-1], frozen.load(run.config))]


def _phase(current: Attempt | None, state: str, reason: str, p: RunProgress) -> str:
    if current is None:
        return f"queued ({reason})" if reason and reason != "None" else "queued" if state == "pending" else "starting"
    name = f"attempt {current.number}" if current.number > 1 else "training"
    if current.ended is not None:
        return f"queued again ({current.ending.value})"
    if not current.nodes:
        return "preflight"
    return "measuring" if p.measured else name if p.step else "starting workers"


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        console=console,
        transient=True,
    )
