"""The job as seen from outside: submit it, ask how it stands, cancel it. Slurm or this machine, one interface."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from clusterrun import process
from clusterrun.config.grace import signal_lead_s
from clusterrun.config.schema import Accelerator, Executor, RunConfig
from clusterrun.config.units import time_limit_minutes
from clusterrun.errors import CommandError, RunError, SubmissionError
from clusterrun.launch import queue
from clusterrun.launch.entry import Entry
from clusterrun.launch.local_steps import processes_by, processes_with
from clusterrun.launch.sbatch import executor_for
from clusterrun.launch.sbatch_words import explain
from clusterrun.rundir import RunDir, write_all_durably

RUN_MARK = "CLUSTERRUN_RUN"
_WHICH_SLURM = ("SLURM_CONF", "SLURM_JWT")  # of a site with several clusters; who one is there
_NO_LIMIT_MIN = 60 * 24 * 365  # submitit's local executor wants a limit


class JobState(Enum):
    pending = "pending"
    running = "running"
    ended = "ended"
    unknown = "unknown"  # the scheduler could not be asked


@dataclass(frozen=True)
class Job:
    """Where a run was submitted last."""

    executor: str
    job_id: str
    run_dir: str
    name: str  # in Slurm, which uses job ids again: the run id, or the sweep's
    workdir: str  # where it was submitted from: a user's own modules and relative paths mean this
    submitted: float  # unix time
    cancelled: float | None = None  # unix time at which a person cancelled it; a pending job leaves no other trace

    @classmethod
    def of(cls, run: RunDir) -> Job:
        """Raises RunError when the run was never submitted, or its file is damaged."""
        try:
            return cls(**json.loads(run.job.read_text()))
        except FileNotFoundError:
            raise RunError(f"{run.root}: was never submitted (no {run.job.name})") from None
        except (ValueError, TypeError):
            raise RunError(f"{run.job}: can't be read; make sure that the run has ended and remove this file") from None

    def write(self, run: RunDir) -> None:
        write_jobs([(run, self)])


def write_jobs(jobs: Sequence[tuple[RunDir, Job]]) -> None:
    """Write down, durably, which job each run has."""
    write_all_durably([(run.job, json.dumps(asdict(job))) for run, job in jobs])


def submit(run: RunDir, config: RunConfig, excluded: Sequence[str] = ()) -> Job:
    """Hand the run to its executor.

    Raises:
        SubmissionError: with the scheduler's own words.
    """
    job = (
        _submit_slurm(run, config, excluded)
        if config.cluster.executor is Executor.slurm
        else _submit_local(run, config)
    )
    job.write(run)
    return job


def state_of(job: Job) -> tuple[JobState, str]:
    """How the job stands, and in the scheduler's words why (for a pending one)."""
    return states_of([job])[job.job_id]


def states_of(jobs: Sequence[Job]) -> dict[str, tuple[JobState, str]]:
    """The same for many at once, by job id (12_3 for a task of an array): one squeue for all of Slurm's."""
    seen = look(jobs)
    return {job.job_id: (seen[job.run_dir].state, seen[job.run_dir].reason) for job in jobs}


@dataclass(frozen=True)
class Seen:
    """A job as the scheduler has it."""

    state: JobState
    reason: str = ""  # in the scheduler's words; for unknown: why it could not be asked
    entry: queue.Entry | None = None  # Slurm's whole line, while it knows the job


def look(jobs: Sequence[Job]) -> dict[str, Seen]:
    """Every job by its run directory: one squeue for all of Slurm's, one look at the processes for those here."""
    found: dict[str, Seen] = {}
    local = [job for job in jobs if job.executor == Executor.local.value]
    slurm = [job for job in jobs if job.executor == Executor.slurm.value]
    if local:
        for job in local:
            _reap(job)
        alive = processes_by(RUN_MARK)
        found.update({j.run_dir: Seen(JobState.running if alive.get(j.run_dir) else JobState.ended) for j in local})
    if slurm:
        try:
            known = queue.in_queue()
        except CommandError as error:
            return {**found, **{job.run_dir: Seen(JobState.unknown, str(error)) for job in slurm}}
        found.update({job.run_dir: _seen(job, known.get(job.job_id)) for job in slurm})
    return found


def _seen(job: Job, entry: queue.Entry | None) -> Seen:
    if entry is None or entry.name != job.name:  # Slurm uses job ids again
        return Seen(JobState.ended)
    if entry.is_pending:
        return Seen(JobState.pending, entry.reason, entry)
    return Seen(JobState.running if entry.is_alive else JobState.ended, entry=entry)


def cancel(job: Job) -> None:
    """Ask the job to end. The conductor then stops the workers, who save."""
    cancel_all([job])


def cancel_all(jobs: Sequence[Job]) -> None:
    """The same for many, by one scancel. Whoever asks has seen that they live."""
    slurm = [job.job_id for job in jobs if job.executor == Executor.slurm.value]
    if slurm:
        process.run(["scancel", *slurm], timeout_s=queue.SLURM_TIMEOUT_S)
    for job in jobs:
        if job.executor == Executor.local.value and int(job.job_id) in _local_processes(job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(job.job_id), signal.SIGTERM)


def ask_to_requeue(job: Job) -> None:
    """Tell the conductor of a running job to have the workers save, and to have itself queued again."""
    if job.executor == Executor.slurm.value:
        # To the batch shell alone, which the conductor has taken the place of: as before a time limit.
        process.run(["scancel", "--batch", "--signal=USR2", job.job_id], timeout_s=queue.SLURM_TIMEOUT_S)
        return
    for pid in _local_processes(job):
        if _parent_of(pid) == int(job.job_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def how_to_cancel(job: Job) -> str:
    """The command a person types."""
    return f"scancel {job.job_id}" if job.executor == Executor.slurm.value else f"kill {job.job_id}"


@contextlib.contextmanager
def clean_environment() -> Iterator[None]:
    """In here nothing of a job or step around us acts as an option of sbatch. Which Slurm it is, stays."""
    kept = {name: os.environ[name] for name in _WHICH_SLURM if name in os.environ}
    with submitit.helpers.clean_env():
        os.environ.update(kept)
        yield


@contextlib.contextmanager
def sbatch_explained(asked: Mapping[str, Any]) -> Iterator[None]:
    """Around a submission by submitit: what sbatch says against it becomes one clear line.

    ``asked`` is what submitit was told of the job.

    Raises:
        SubmissionError: there is no sbatch here, or it refused.
    """
    if shutil.which("sbatch") is None:
        raise SubmissionError(
            "sbatch: command not found on this machine; submit from a login node of the cluster, "
            "rehearse with scripts/slurm_lab, or run here with cluster=laptop"
        )
    words = io.StringIO()
    try:
        # Inside another job or step SLURM_* would act as options of sbatch (a known cause of wrong CPU bindings).
        with clean_environment(), contextlib.redirect_stderr(words):
            yield
    except (FailedJobError, FailedSubmissionError) as error:
        raise SubmissionError(explain(words.getvalue().strip() or str(error), asked)) from None


def _submit_slurm(run: RunDir, config: RunConfig, excluded: Sequence[str]) -> Job:
    executor = executor_for(config, run, excluded)
    with sbatch_explained(executor.parameters):
        job = executor.submit(Entry(str(run.root)))
    shutil.copyfile(job.paths.submission_file, run.submission)
    return Job(Executor.slurm.value, str(job.job_id), str(run.root), run.id, os.getcwd(), time.time())


def _submit_local(run: RunDir, config: RunConfig) -> Job:
    executor = submitit.LocalExecutor(folder=run.submitit)
    cluster = config.cluster
    limit = time_limit_minutes(cluster.time_limit) if cluster.time_limit else _NO_LIMIT_MIN
    gpus = cluster.nodes * cluster.nproc_per_node if cluster.accelerator is Accelerator.cuda else 0
    executor.update_parameters(timeout_min=limit, signal_delay_s=signal_lead_s(config), gpus_per_node=gpus)
    with _out_of_the_terminals_reach(run.submitit / "controller.log"), _marked(run):
        job = executor.submit(Entry(str(run.root)))
    return Job(Executor.local.value, str(job.job_id), str(run.root), run.id, os.getcwd(), time.time())


@contextlib.contextmanager
def _out_of_the_terminals_reach(log: Path) -> Iterator[None]:
    """Processes started in here ignore Ctrl-C and the closing of the terminal (an ignored signal survives exec).

    Whoever follows the run decides what Ctrl-C means; a run left alone goes on. Their output goes to ``log``: holding
    on to our own would keep a pipe open that somebody waits on.
    """
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    sys.stdout.flush()
    sys.stderr.flush()
    own = [os.dup(fd) for fd in (0, 1, 2)]
    with log.open("ab") as out, open(os.devnull, "rb") as nothing:
        for fd, file in ((0, nothing), (1, out), (2, out)):
            os.dup2(file.fileno(), fd)
        try:
            yield
        finally:
            for fd, saved in enumerate(own):
                os.dup2(saved, fd)
                os.close(saved)
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _marked(run: RunDir) -> Iterator[None]:
    """Processes started in here carry the run's directory in their environment."""
    os.environ[RUN_MARK] = str(run.root)
    try:
        yield
    finally:
        del os.environ[RUN_MARK]


def _local_processes(job: Job) -> list[int]:
    """Ids of every process of a local run, found by the mark in their environment: ids alone are used again."""
    _reap(job)
    return processes_with(RUN_MARK, job.run_dir)


def _reap(job: Job) -> None:
    """When it was our own child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(int(job.job_id), os.WNOHANG)
