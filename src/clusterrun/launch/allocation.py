"""The conductor's view of the job it runs in: where steps run, why it was signalled, how to be started again."""

from __future__ import annotations

import os
import re
import time
from typing import Protocol

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from clusterrun import process
from clusterrun.config.schema import ClusterConfig, Executor
from clusterrun.errors import CommandError, ExitCode
from clusterrun.launch.local_steps import LocalSteps
from clusterrun.launch.slurm_steps import SLURM_TIMEOUT_S, SlurmSteps
from clusterrun.launch.steps import StepRunner
from clusterrun.ledger import Ending

# Slurm sends the signal before the time limit up to a minute early (man sbatch, --signal).
_SIGNAL_RESOLUTION_S = 60


class Allocation(Protocol):
    """The job around the conductor."""

    job_id: str
    steps: StepRunner

    def why_stopped(self, signals: set[str]) -> Ending:
        """What a stop was about, given the names of the signals the conductor got (none when only the tasks got one)."""
        ...

    def requeue(self) -> int:
        """Have the job started again; returns the exit code to end with at once.

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
        self._signal_lead_s = signal_lead_s

    def why_stopped(self, signals: set[str]) -> Ending:
        try:
            job = process.run(["scontrol", "show", "job", self.job_id, "--oneliner"], timeout_s=SLURM_TIMEOUT_S)
        except CommandError:
            job = ""
        state = _field(job, "JobState")
        if state == "CANCELLED":
            return Ending.cancelled
        if state == "PREEMPTED" or _field(job, "PreemptTime") not in ("", "None"):
            return Ending.preempted
        if state == "TIMEOUT":
            return Ending.time_limit
        end = _field(job, "EndTime")
        if "SIGUSR2" in signals and re.match(r"\d{4}-", end):
            left = time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S")) - time.time()
            if left <= self._signal_lead_s + _SIGNAL_RESOLUTION_S + 10:
                return Ending.time_limit
        return Ending.stopped

    def requeue(self) -> int:
        process.run(["scontrol", "requeue", self.job_id], timeout_s=SLURM_TIMEOUT_S)
        return int(ExitCode.REQUEUE)


class LocalAllocation:
    """A job of submitit's local executor on this machine."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.job_id = os.environ.get("SUBMITIT_LOCAL_JOB_ID", str(os.getpid()))
        self.steps: StepRunner = LocalSteps(cluster)

    def why_stopped(self, signals: set[str]) -> Ending:
        if "SIGINT" in signals or "SIGTERM" in signals:
            return Ending.cancelled
        return Ending.time_limit if "SIGUSR2" in signals else Ending.stopped

    def requeue(self) -> int:
        return int(LOCAL_REQUEUE_RETURN_CODE)  # submitit's local controller starts the task again


def allocation_for(cluster: ClusterConfig, signal_lead_s: int) -> Allocation:
    """The allocation this process runs in."""
    if cluster.executor is Executor.slurm:
        return SlurmAllocation(cluster, signal_lead_s)
    return LocalAllocation(cluster)


def _field(job: str, name: str) -> str:
    match = re.search(rf"(?:^|\s){name}=(\S+)", job)
    return match.group(1) if match else ""
