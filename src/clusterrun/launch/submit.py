"""Claim a run directory, write what was decided, hand it to the executor; and the same for a run that stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from clusterrun.config import frozen
from clusterrun.config.schema import Executor, RunConfig
from clusterrun.config.validate import validated
from clusterrun.errors import ConfigError, RunError
from clusterrun.launch import code, jobs, notify
from clusterrun.launch.jobs import Job, JobState
from clusterrun.launch.plan import Plan, excluded_nodes, make_plan, next_run_id
from clusterrun.ledger import Ending, Ledger
from clusterrun.rundir import RUNS, RunDir, run_roots, write_durably

LAST = "last"


@dataclass(frozen=True)
class Submitted:
    run: RunDir
    job: Job
    config: RunConfig
    plan: Plan
    attempts_before: int = 0  # attempts of earlier submissions


def submit(config: RunConfig) -> Submitted:
    """Submit a new run.

    Raises:
        ConfigError: the configuration, or a shared_dir that can't be written.
        SubmissionError: the scheduler refused.
    """
    config = validated(config)
    make_plan(config)  # everything that can be wrong with it is found before anything is made
    check_place(config)
    code.check_snapshot(config)
    waiting = with_dependency(config)
    while True:
        plan = make_plan(waiting, next_run_id(config), excluded_nodes(config))
        try:
            run = RunDir.create(Path(config.cluster.shared_dir), plan.run_id)
            break
        except FileExistsError:
            continue  # another submission took the id a moment ago
        except OSError as error:
            raise ConfigError(
                f"cluster.shared_dir={config.cluster.shared_dir}: can't be written "
                f"({error.filename}: {error.strerror}); "
                "set cluster.shared_dir or CLUSTERRUN_SHARED_DIR to a directory of yours that all nodes see"
            ) from None
    try:
        code.record(config, run.code)
        own = code.from_copy(config, run.code)
        with code.inside(run.code):
            if own is not config:
                plan = make_plan(with_dependency(own), run.id, plan.excluded)
            write_decided(run, own, plan)
            job = jobs.submit(run, with_dependency(own), plan.excluded)
    except BaseException:  # nothing runs and nothing will: leave no run behind that would take the id
        shutil.rmtree(run.root, ignore_errors=True)
        raise
    return Submitted(run, job, own, plan)


def with_dependency(config: RunConfig) -> RunConfig:
    """``after=<run>`` as Slurm understands it: beside the dependency that was given, afterok on that run's job.

    A run that is done needs no waiting for.

    Raises:
        RunError: no such run, or one that can't end well any more.
        ConfigError: this machine has no queue to wait in.
    """
    if config.after is None:
        return config
    run = find_run(config.after, [Path(config.cluster.shared_dir)])
    attempts = Ledger(run.ledger).attempts()
    if attempts and attempts[-1].ending is Ending.done:
        return config
    job = Job.of(run)
    state, detail = jobs.state_of(job)
    if state is JobState.unknown:
        raise RunError(f"after={config.after}: can't tell how {run.id} stands ({detail})")
    if state is JobState.ended:
        raise RunError(f"after={config.after}: {run.id} ended without being done; resume it first, or leave after= out")
    if config.cluster.executor is not Executor.slurm or job.executor != Executor.slurm.value:
        raise ConfigError(f"after={config.after}: only a job of Slurm can wait, and only for one of Slurm")
    slurm = config.cluster.slurm
    both = ",".join(part for part in (slurm.dependency, f"afterok:{job.job_id}") if part)
    return replace(config, cluster=replace(config.cluster, slurm=replace(slurm, dependency=both)))


def write_decided(run: RunDir, config: RunConfig, plan: Plan) -> None:
    """What a new run directory holds before anything starts."""
    write_durably(run.config, frozen.to_yaml(config))
    write_durably(run.plan, json.dumps(plan.as_json(), indent=1))


def check_place(config: RunConfig) -> None:
    """Whether it may and can be submitted from here. Raises ConfigError."""
    notify.check(config.notify)
    _check_inside_job(config)
    _check_writable(Path(config.cluster.shared_dir))


def resume(run: RunDir) -> Submitted:
    """Submit a run that stopped once more; it goes on from its newest checkpoint.

    Raises:
        RunError: it still lives, or it is done.
    """
    config = frozen.load(run.config)
    state, detail = jobs.state_of(Job.of(run)) if run.job.exists() else (JobState.ended, "")
    if state in (JobState.running, JobState.pending):
        raise RunError(f"{run.id}: still {state.value} as job {Job.of(run).job_id}; nothing to resume")
    if state is JobState.unknown:
        raise RunError(f"{run.id}: can't tell whether it still lives ({detail}); not resuming")
    attempts = Ledger(run.ledger).attempts()
    if attempts and attempts[-1].ending is Ending.done:
        raise RunError(f"{run.id}: is done; nothing to resume")
    _check_inside_job(config)
    plan = make_plan(config, run.id, excluded_nodes(config))
    if run.job.exists():
        _enter(Path(Job.of(run).workdir))
    code.use_copy(run.code)
    return Submitted(run, jobs.submit(run, config, plan.excluded), config, plan, len(attempts))


def _enter(workdir: Path) -> None:
    try:
        os.chdir(workdir)
    except OSError as error:
        raise RunError(
            f"{workdir}: the run was submitted from there, and it can't be entered ({error.strerror})"
        ) from None


def find_run(name: str, shared_dirs: list[Path]) -> RunDir:
    """A run by path, by id (SWEEP/RUN for a point of a sweep), or by the beginning of its id.

    Raises:
        RunError: none, or several.
    """
    if Path(name).is_dir():
        return RunDir.open(Path(name).expanduser())
    if name == LAST:
        return RunDir.open(last_submitted(shared_dirs))
    sweep, _, run = name.rpartition("/")
    found = sorted(
        path
        for shared_dir in shared_dirs
        for path in run_roots(shared_dir)
        if path.name.startswith(run) and (not sweep or path.parent.name.startswith(sweep))
    )
    if not found and os.sep in name:
        return RunDir.open(Path(name).expanduser())
    exact = [p for p in found if p.name == run]
    if len(exact or found) == 1:
        return RunDir.open((exact or found)[0])
    where = ", ".join(str(d / RUNS) for d in shared_dirs)
    if not found:
        raise RunError(f"{name}: no such run in {where}")
    names = [p.name if p.parent.name == RUNS else f"{p.parent.name}/{p.name}" for p in found[:5]]
    raise RunError(f"{name}: several runs begin so: {', '.join(names)}")


def last_submitted(shared_dirs: list[Path]) -> Path:
    """Directory of the run that was submitted last. Raises RunError when there is none."""
    submitted: list[tuple[float, Path]] = []
    for root in (path for shared_dir in shared_dirs for path in run_roots(shared_dir)):
        with contextlib.suppress(RunError):
            submitted.append((Job.of(RunDir(root)).submitted, root))
    if not submitted:
        raise RunError(f"{LAST}: nothing was submitted yet in {', '.join(map(str, shared_dirs))}")
    return max(submitted)[1]


def _check_inside_job(config: RunConfig) -> None:
    """Jobs that submit jobs loop for ever when a config goes wrong; the laptop executor inside a job is fine."""
    if config.cluster.executor is Executor.slurm and os.environ.get("CLUSTERRUN_NODE"):
        raise ConfigError("cluster.executor=slurm: this process is itself part of a run; submit from outside")


def _check_writable(shared_dir: Path) -> None:
    existing = shared_dir / RUNS
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"cluster.shared_dir={shared_dir}: can't be written ({existing} is "
            f"{'not writable' if existing.is_dir() else 'not a directory'}); "
            "set cluster.shared_dir or CLUSTERRUN_SHARED_DIR to a directory of yours that all nodes see"
        )
