"""The conductor's view of the job it runs in: where steps run, why it was signalled, how to be started again."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import Protocol

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from clusterrun import process
from clusterrun.config.schema import ClusterConfig, Executor
from clusterrun.errors import CommandError, ExitCode
from clusterrun.launch.head_watch import HeadWatch
from clusterrun.launch.local_steps import LocalSteps
from clusterrun.launch.slurm_steps import SLURM_TIMEOUT_S, SlurmSteps, ask_controller, job_field, job_restarts
from clusterrun.launch.steps import StepRunner
from clusterrun.ledger import Ending
from clusterrun.rundir import AttemptDir

# Slurm sends the signal before the time limit up to a minute early (man sbatch, --signal).
_SIGNAL_RESOLUTION_S = 60
_PENDING_PATIENCE_S = 20.0
# Of the time that a run on this machine has until it is signalled: what is left is for its own start.
_LOCAL_LIMIT_SHARE = 0.7


class Allocation(Protocol):
    """The job around the conductor."""

    job_id: str
    steps: StepRunner

    def why_stopped(self, signals: set[str]) -> Ending:
        """What a stop was about; ``signals`` names those that the conductor got, none when only the tasks got one."""
        ...

    def queued_since(self) -> float | None:
        """Unix time at which the job was submitted, or queued again, before it started; None when nobody knows."""
        ...

    def is_gone(self) -> bool:
        """Whether the scheduler has taken the job back (it runs elsewhere, waits, or ended): nothing may start here."""
        ...

    def watch_head(self, attempt: AttemptDir, nodes: Sequence[str]) -> None:
        """From now on some of ``nodes`` see to it that the job is queued again when the conductor's own host is lost.

        Harmless to repeat. Raises CommandError when the watch can't be started.
        """
        ...

    def leave(self) -> None:
        """The conductor ends: what helped it may end."""
        ...

    def requeue(self, without: Sequence[str]) -> int:
        """Have the job started again, avoiding some nodes; returns the exit code to end with at once.

        Raises:
            CommandError: the scheduler or the site forbids it.
        """
        ...


class SlurmAllocation:
    """A Slurm job. Decisions come from what Slurm says of the job, not from the clock alone."""

    def __init__(self, cluster: ClusterConfig, signal_lead_s: int) -> None:
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        self.job_id = f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]
        self.steps: StepRunner = SlurmSteps(cluster, self.job_id)
        self._restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._head_watch = HeadWatch(self.steps, self.job_id, os.environ.get("SLURMD_NODENAME"), self._restarts)
        self._signal_lead_s = signal_lead_s
        self._requeued = False  # by Slurm or by a person, before we came to it

    def why_stopped(self, signals: set[str]) -> Ending:
        try:
            job = process.run(["scontrol", "show", "job", self.job_id, "--oneliner"], timeout_s=SLURM_TIMEOUT_S)
        except CommandError:
            job = ""
        # A job that Slurm is ending already shows COMPLETING, whatever the cause. A requeue has counted up Restarts;
        # the time limit shows in RunTime; what is left is scancel.
        ending_already = job_field(job, "JobState") in ("COMPLETING", "CANCELLED", "TIMEOUT", "PREEMPTED")
        self._requeued = job_restarts(job) > self._restarts
        left = _seconds_until(job_field(job, "EndTime"))
        if self._requeued:
            return Ending.requeued
        if job_field(job, "PreemptTime") not in ("", "None"):
            return Ending.preempted
        if ending_already:
            return Ending.time_limit if job_field(job, "JobState") == "TIMEOUT" or _ran_out(job) else Ending.cancelled
        if "SIGUSR2" in signals and left is not None and left <= self._signal_lead_s + _SIGNAL_RESOLUTION_S + 10:
            return Ending.time_limit
        return Ending.stopped

    def queued_since(self) -> float | None:
        try:
            job = process.run(["scontrol", "show", "job", self.job_id, "--oneliner"], timeout_s=SLURM_TIMEOUT_S)
        except CommandError:
            return None
        return _unix_time(job_field(job, "SubmitTime"))

    def is_gone(self) -> bool:
        ask = ["scontrol", "show", "job", self.job_id, "--oneliner"]
        try:
            # As long as it takes: without an answer nothing can be started, and who is cut off must not go on.
            job = ask_controller(ask, patience_s=float("inf"))
        except CommandError as error:
            return "Invalid job id" in error.output  # forgotten; or no scontrol on compute nodes, and nobody can tell
        return job_field(job, "JobState") != "RUNNING" or job_restarts(job) > self._restarts

    def watch_head(self, attempt: AttemptDir, nodes: Sequence[str]) -> None:
        self._head_watch.ensure(attempt, nodes)

    def leave(self) -> None:
        self._head_watch.stop()

    def requeue(self, without: Sequence[str]) -> int:
        self._head_watch.stop()  # the fewer steps live, the less Slurm has to tidy up
        if not self._requeued:
            try:
                ask_controller(["scontrol", "requeue", self.job_id])
            except CommandError:
                if not self.is_gone():  # an earlier try may have been heard, and only its answer lost
                    raise
        if without:
            self._avoid(without)
        return int(ExitCode.REQUEUE)

    def _avoid(self, nodes: Sequence[str]) -> None:
        """Slurm changes the nodes of a job only while it is pending, which it is a moment after the requeue."""
        update = ["scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={','.join(nodes)}"]
        end = time.monotonic() + _PENDING_PATIENCE_S
        while True:
            try:
                process.run(update, timeout_s=SLURM_TIMEOUT_S)
                return
            except CommandError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)


class LocalAllocation:
    """A job of submitit's local executor on this machine."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.job_id = os.environ.get("SUBMITIT_LOCAL_JOB_ID", str(os.getpid()))
        self.steps: StepRunner = LocalSteps(cluster)
        self._began = time.monotonic()

    def why_stopped(self, signals: set[str]) -> Ending:
        if "SIGINT" in signals or "SIGTERM" in signals:
            return Ending.cancelled
        if "SIGUSR2" not in signals:
            return Ending.stopped
        return Ending.time_limit if self._limit_is_near() else Ending.requeued  # by a person: clusterrun requeue

    def _limit_is_near(self) -> bool:
        """Whether submitit's controller signals about now. It began a little before us, and never signals early."""
        limit, lead = (os.environ.get(f"SUBMITIT_LOCAL_{name}") for name in ("TIMEOUT_S", "SIGNAL_DELAY_S"))
        if limit is None or lead is None:
            return False
        return time.monotonic() - self._began > _LOCAL_LIMIT_SHARE * (float(limit) - float(lead))

    def queued_since(self) -> float | None:
        return None

    def is_gone(self) -> bool:
        return False

    def watch_head(self, attempt: AttemptDir, nodes: Sequence[str]) -> None:
        """One machine: nothing of the run outlives it."""

    def leave(self) -> None:
        """Nothing helped."""

    def requeue(self, without: Sequence[str]) -> int:
        return int(LOCAL_REQUEUE_RETURN_CODE)  # submitit's local controller starts the task again


def allocation_for(cluster: ClusterConfig, signal_lead_s: int) -> Allocation:
    """The allocation this process runs in."""
    if cluster.executor is Executor.slurm:
        return SlurmAllocation(cluster, signal_lead_s)
    return LocalAllocation(cluster)


def _seconds_until(text: str) -> float | None:
    """Seconds from now to a time as scontrol prints it; None for Unknown and the like."""
    at = _unix_time(text)
    return None if at is None else at - time.time()


def _unix_time(text: str) -> float | None:
    if not re.match(r"\d{4}-", text):
        return None
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def _ran_out(job: str) -> bool:
    """Whether RunTime has reached TimeLimit (both as [D-]HH:MM:SS)."""
    run_time, limit = _clock(job_field(job, "RunTime")), _clock(job_field(job, "TimeLimit"))
    return run_time is not None and limit is not None and run_time >= limit


def _clock(text: str) -> int | None:
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, minutes, seconds = (int(g or 0) for g in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
