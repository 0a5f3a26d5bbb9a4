"""The Python API, and what the command line itself calls: ``from clusterrun import compose, plan, submit, Run``.

config = compose(["+cluster=a100_nvswitch", "train=ddp_linear", "train.lr=0.2"])
print(plan(config).sbatch)
run = submit(config)
if run.wait() == 0:
    print(run.status().value)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterrun.config import frozen
from clusterrun.config.compose import compose
from clusterrun.config.schema import RunConfig
from clusterrun.errors import ClusterrunError, ExitCode
from clusterrun.launch import submit as submission
from clusterrun.launch.plan import Plan, plan_next
from clusterrun.launch.submit import Submitted
from clusterrun.ledger import Attempt, Ledger
from clusterrun.operate import control, find, logs
from clusterrun.operate.find import Found
from clusterrun.operate.logs import RankError
from clusterrun.operate.status import RunState, RunStatus, status_of, with_goodput
from clusterrun.report.events import EventTail
from clusterrun.rundir import RunDir, default_shared_dir

__all__ = ["Plan", "Run", "RunConfig", "RunState", "RunStatus", "compose", "plan", "submit"]

_POLL_S = 2.0
_GONE_S = 20.0  # how long a job may be gone before its last words are given up
_CODES = {RunState.done: ExitCode.DONE, RunState.cancelled: ExitCode.CANCELLED, RunState.stopped: ExitCode.REQUEUE}


def plan(config: RunConfig) -> Plan:
    """What ``submit`` would send, and nothing is made or sent.

    Raises:
        ConfigError: the configuration is wrong.
    """
    return plan_next(config)


def submit(config: RunConfig) -> Run:
    """Submit a run, and return at once.

    Raises:
        ConfigError: the configuration is wrong, or ``cluster.shared_dir`` can't be written.
        SubmissionError: the scheduler refused, in one line with what it offers instead.
    """
    sent = submission.submit(config)
    return Run(sent.run.root, sent)


@dataclass(frozen=True)
class Run:
    """A run that was submitted, by its directory. Every question reads the disk and asks the scheduler anew."""

    path: Path
    submitted: Submitted | None = field(default=None, repr=False, compare=False)  # when it was submitted right here

    @classmethod
    def find(cls, name: str, shared_dir: Path | None = None) -> Run:
        """By id, the beginning of one, SWEEP/RUN, a path, or ``last``. Raises RunError for none, or several."""
        return cls(find.find_one(name, shared_dir or default_shared_dir()).run.root)

    @classmethod
    def all(cls, shared_dir: Path | None = None) -> list[Run]:
        """Every run, those of sweeps too."""
        return [cls(found.run.root) for found in find.all_runs(shared_dir or default_shared_dir())]

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def directory(self) -> RunDir:
        """Every path of it."""
        return RunDir(self.path)

    @property
    def config(self) -> RunConfig:
        """As it was frozen at submission."""
        return frozen.load(self.directory.config)

    @property
    def attempts(self) -> list[Attempt]:
        """Every start so far, oldest first: why it began, on which nodes, how it ended."""
        return Ledger(self.directory.ledger).attempts()

    def status(self) -> RunStatus:
        """How it stands now."""
        return with_goodput(status_of([self._found]))[0]

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank wrote of its steps, validations and checkpoints, over all attempts."""
        return EventTail(self.directory, rank).new()

    def errors(self, attempt: int | None = None) -> list[RankError]:
        """The different errors of an attempt (default: the newest that failed), the one that began it first."""
        chosen = logs.pick_attempt(self.directory, attempt)
        return logs.errors_of(self.directory, chosen)

    def wait(self, timeout_s: float | None = None) -> int:
        """Until it lives no more; the exit code it ended with (README, "Exit codes").

        Raises:
            TimeoutError: it still lives after ``timeout_s`` seconds.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        gone: float | None = None
        while True:
            (now,) = status_of([self._found])
            if now.exit_code is not None:
                return now.exit_code
            if now.state.lives or now.state is RunState.unknown:
                gone = None
            else:  # another host may have written its end a moment ago
                gone = gone or time.monotonic()
                if time.monotonic() - gone > _GONE_S:
                    return int(_CODES.get(now.state, ExitCode.USER_CODE_FAILED))
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"{self.id}: still {now.state.value} after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def cancel(self) -> bool:
        """Have it save and end. Returns False when it lived no more."""
        asked, _ = control.cancel([self._found])
        return bool(asked)

    def requeue(self) -> None:
        """Have it save, give its nodes back and queue again. Raises RunError when it does not run."""
        control.requeue(self._found)

    def resume(self) -> Run:
        """Submit it once more; it goes on from its newest checkpoint. Raises RunError when it lives, or is done."""
        sent = submission.resume(self.directory)
        return Run(sent.run.root, sent)

    @property
    def _found(self) -> Found:
        return find.found_at(self.path)


def submitted(run: Run) -> Submitted:
    """What there is to say right after a submission. Raises ClusterrunError when it was not made here."""
    if run.submitted is None:
        raise ClusterrunError(f"{run.id}: was not submitted by this process")
    return run.submitted
