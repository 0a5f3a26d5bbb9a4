"""After a submission: say what was submitted, and follow it when asked to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun.errors import ClusterrunError, ExitCode

if TYPE_CHECKING:
    from clusterrun.launch.submit import Submitted


def announce(submitted: Submitted, wait: bool | None) -> int:
    """Say what was submitted and what to type next; follow it when asked to."""
    from rich.console import Console

    from clusterrun.config.schema import Executor
    from clusterrun.rundir import default_shared_dir

    console = Console(highlight=False)
    run, job, local = submitted.run, submitted.job, submitted.config.cluster.executor is Executor.local
    r, batch = submitted.plan.resources, submitted.plan.batch
    console.print(f"submitted {run.id} as {'process' if local else 'job'} {job.job_id}", markup=False)
    console.print(f"  directory  {run.root}", markup=False, soft_wrap=True)
    console.print(f"  world size {r.world_size}: {r.nodes} nodes x {r.nproc_per_node} workers", markup=False)
    if batch:
        console.print(f"  batch      {batch.global_} samples per step, {batch.per_rank} per rank", markup=False)
    if not (local if wait is None else wait):
        found = Path(submitted.config.cluster.shared_dir or ".") == default_shared_dir()
        name = run.id if found else run.root  # runs elsewhere are named by their path
        for word, command in (("status", f"status {name}"), ("log", f"logs {name} -f"), ("cancel", f"cancel {name}")):
            console.print(f"  {word:10} clusterrun {command}", markup=False, soft_wrap=True)
        return 0
    return _follow(submitted)


def _state_of(submitted: Submitted) -> Callable[[], tuple[str, str]]:
    from clusterrun.launch import jobs

    def state() -> tuple[str, str]:
        now, reason = jobs.state_of(submitted.job)
        return now.value, reason

    return state


def wait_quietly(submitted: Submitted) -> int:
    """Follow a run on standard error; standard output is for the result."""
    from rich.console import Console

    from clusterrun.report.follow import follow

    followed = follow(submitted.run, submitted.attempts_before, _state_of(submitted), Console(stderr=True))
    if not submitted.run.all_attempts():
        raise ClusterrunError(f"{submitted.run.id}: {followed.message}")
    return followed.exit_code


def _follow(submitted: Submitted) -> int:
    from rich.console import Console

    from clusterrun.config.schema import Executor
    from clusterrun.launch import jobs
    from clusterrun.report.follow import follow, nccl_summary, summary

    console = Console(highlight=False)
    run, job, state = submitted.run, submitted.job, _state_of(submitted)

    try:
        followed = follow(run, submitted.attempts_before, state, console)
    except KeyboardInterrupt:
        if submitted.config.cluster.executor is Executor.slurm:
            console.print(
                f"\nno longer following; the job goes on. Cancel it with: {jobs.how_to_cancel(job)}", markup=False
            )
            return int(ExitCode.CANCELLED)
        console.print(
            "\nstopping: the workers save at their next step (Ctrl-C again to leave them to it)", markup=False
        )
        jobs.cancel(job)
        followed = follow(run, submitted.attempts_before, state, console)
    for line in [*summary(run, followed), *nccl_summary(run, followed)]:
        console.print(line, markup=False, soft_wrap=True)
    return followed.exit_code
