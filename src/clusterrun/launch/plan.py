"""The plan: everything a configuration will do, before it does it.

``make_plan`` looks at nothing but the environment, which wins over what is derived. ``next_run_id`` looks at the disk:
which run id is free.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterrun.config import frozen
from clusterrun.config.batch import BatchSizes, batch_sizes
from clusterrun.config.checks import made, made_slow
from clusterrun.config.grace import signal_lead_s
from clusterrun.config.schema import Action, BenchConfig, DataKind, Executor, RunConfig
from clusterrun.config.units import time_limit_minutes
from clusterrun.config.user_dirs import user_config_dirs
from clusterrun.config.validate import validated
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.prediction import Prediction, predict
from clusterrun.errors import ConfigError
from clusterrun.launch import exclusions
from clusterrun.launch.commands import preflight_argv, step_environment, training_argv
from clusterrun.launch.resources import requested_gpus
from clusterrun.launch.sbatch import sbatch_text
from clusterrun.launch.srun import srun_argv
from clusterrun.nccl import harm, settings
from clusterrun.nccl.settings import Setting
from clusterrun.rundir import RUNS, RunDir, SweepDir
from clusterrun.train.builtin import BUILTINS, TOKENS, VECTORS, check_task_args

SEEN_AT_START = "<address>:<port>"  # chosen by preflight on the nodes
# Settings that don't change what is computed, and so not the run's id.
_VIEW_ONLY = {"wait", "run_id", "sweep", "notify", "after", "snapshot", "snapshot_limit_mb"}


@dataclass(frozen=True)
class Resources:
    """What is asked of the scheduler."""

    nodes: int
    spare_nodes: int
    nproc_per_node: int
    world_size: int
    gpus_per_node: int  # requested, one per worker
    cpus_per_node: int
    time_limit_min: int | None
    signal_lead_s: int


@dataclass(frozen=True)
class Plan:
    """Frozen and printable; ``clusterrun plan --json`` prints ``as_json``."""

    run_id: str
    run_dir: str
    executor: str
    cluster: str
    job: str  # the task or script, or what is measured
    resources: Resources
    batch: BatchSizes | None  # None for train=script, and where nothing is trained
    checks: tuple[str, ...]
    slow_checks: tuple[str, ...]  # with preflight=full, on the nodes that passed the others
    preflight_argv: tuple[str, ...]
    training_argv: tuple[str, ...]  # as on the first start, with the rendezvous still open
    environment: dict[str, str]  # added for every step
    settings: tuple[Setting, ...]  # each variable with its reason, also those that each node settles
    warnings: tuple[str, ...]  # variables in the environment that hurt
    sbatch: str | None  # the very text that is submitted; None without Slurm
    after_signal: str
    prediction: Prediction | None  # of a training step; None where nothing is trained
    excluded: tuple[str, ...]  # refused by an earlier preflight; part of --exclude

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def base_run_id(config: RunConfig) -> str:
    """Name and a hash of the configuration: the same configuration has the same id, which sweeps rely on.

    Only what differs from the schema's defaults is hashed, so that a setting added in a later version changes no id.
    """
    if config.run_id is not None:
        return config.run_id
    own = _differing(frozen.to_dict(config), _defaults())
    for key in _VIEW_ONLY:
        own.pop(key, None)
    digest = hashlib.sha256(repr(_ordered(own)).encode()).hexdigest()[:8]
    what = config.train.name if config.action is Action.train else config.action.value
    return f"{config.name or f'{what}-{config.cluster.name}'}-{digest}"


@functools.cache
def _defaults() -> dict[str, Any]:
    return frozen.to_dict(RunConfig())


def _differing(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What differs, nested as it was."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            if inner := _differing(value, default):
                found[key] = inner
        elif value != default or type(value) is not type(default):
            found[key] = value
    return found


def _ordered(value: Any) -> Any:
    """Dictionaries as lists in the order of their keys: the order of overrides changes no id."""
    if isinstance(value, dict):
        return sorted(((str(key), _ordered(item)) for key, item in value.items()), key=lambda item: item[0])
    return value


def make_plan(
    config: RunConfig, run_id: str | None = None, excluded: Sequence[str] = (), sweep: SweepDir | None = None
) -> Plan:
    """The plan of a configuration, under the given run id, without the nodes that preflight refused before.

    ``sweep``: it is a point of this one, and lives there. The script is then the sweep's to make, one for many.

    Raises:
        ConfigError: the configuration is wrong.
    """
    return Planner().plan(validated(config), run_id, excluded, sweep)


class Planner:
    """Plans many configurations, as those of a sweep: the catalogue of hardware is read once."""

    def __init__(self) -> None:
        self._catalog = Catalog(user_config_dirs())

    def plan(self, config: RunConfig, run_id: str | None, excluded: Sequence[str], sweep: SweepDir | None) -> Plan:
        """As ``make_plan``, of a configuration that is validated."""
        prediction = None
        if config.action is Action.train:
            prediction = predict(config, self._catalog, {**os.environ, **config.cluster.env})
        return _plan(config, run_id, excluded, sweep, prediction)


def _plan(
    config: RunConfig,
    run_id: str | None,
    excluded: Sequence[str],
    sweep: SweepDir | None,
    prediction: Prediction | None,
) -> Plan:
    cluster, train = config.cluster, config.train
    check_task(config)
    if config.action is Action.bench or config.bench != BenchConfig():
        from clusterrun.measure.bench_check import check_bench

        check_bench(config)
    name = run_id or base_run_id(config)
    run = sweep.run(name) if sweep else RunDir(Path(cluster.shared_dir) / RUNS / name)
    slurm = cluster.executor is Executor.slurm
    cpus = cluster.nproc_per_node * cluster.cpus_per_proc
    nodes = [f"<node{i}>" for i in range(cluster.nodes)]
    everywhere = [f"<node{i}>" for i in range(cluster.nodes + cluster.spare_nodes)]
    preflight = preflight_argv(config, run, 1, "<head address>", "<token>")
    training = training_argv(config, run, 1, SEEN_AT_START, "<secret>")
    minutes = time_limit_minutes(cluster.time_limit) if cluster.time_limit else None
    return Plan(
        run_id=run.id,
        run_dir=str(run.root),
        executor=cluster.executor.value,
        cluster=cluster.name,
        job=_job(config),
        resources=Resources(
            nodes=cluster.nodes,
            spare_nodes=cluster.spare_nodes,
            nproc_per_node=cluster.nproc_per_node,
            world_size=config.world_size,
            gpus_per_node=requested_gpus(config),
            cpus_per_node=cpus,
            time_limit_min=minutes,
            signal_lead_s=signal_lead_s(config),
        ),
        batch=batch_sizes(train, config.world_size) if train.task and config.action is Action.train else None,
        checks=tuple(made(config.preflight.policy)),
        slow_checks=tuple(made_slow(config.preflight.policy)) if config.preflight.full else (),
        preflight_argv=tuple(srun_argv(everywhere, preflight, cpus) if slurm else preflight),
        training_argv=tuple(srun_argv(nodes, training, cpus) if slurm else training),
        environment=step_environment(config),
        settings=settings.planned(config, os.environ),
        warnings=tuple(map(str, harm.harms({**os.environ, **cluster.env}, cluster))),
        sbatch=sbatch_text(config, run, excluded) if slurm and sweep is None else None,
        excluded=tuple(excluded),
        prediction=prediction,
        after_signal="save and requeue" if config.recovery.requeue else "save and stop",
    )


def _job(config: RunConfig) -> str:
    if config.action is Action.bench:
        return f"bench {config.bench.collective} ({config.bench.tool})"
    return config.train.script or str(config.train.task)


def check_task(config: RunConfig) -> None:
    """A built-in task takes known arguments and one kind of data. Raises ConfigError."""
    task = config.train.task
    if task is None:
        return
    if ":" in task and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", task):
        raise ConfigError(f"train.task={task}: not the place of a class; write package.module:Class")
    check_task_args(task, config.train.task_args)
    if task not in BUILTINS:
        return
    takes, kind = BUILTINS[task].takes, config.data.kind
    fits = {VECTORS: (DataKind.synthetic, DataKind.mnist5k, DataKind.idx), TOKENS: (DataKind.synthetic, DataKind.text)}
    if kind not in fits[takes]:
        allowed = ", ".join(k.value for k in fits[takes])
        raise ConfigError(f"data={kind.value}: train.task={task} takes {takes}; use one of {allowed}")


def next_run_id(config: RunConfig) -> str:
    """The first id of base, base-2, base-3, ... that no run directory has yet.

    Raises:
        ConfigError: run_id was given and is taken.
    """
    base = base_run_id(config)
    runs = Path(config.cluster.shared_dir) / RUNS
    if not (runs / base).exists():
        return base
    if config.run_id is not None:
        raise ConfigError(
            f"run_id={base}: {runs / base} exists; go on with it (clusterrun resume {base}) or take another id"
        )
    return next(name for name in (f"{base}-{i}" for i in range(2, 1_000_000)) if not (runs / name).exists())


def plan_next(config: RunConfig) -> Plan:
    """The plan of what ``submit`` would send right now; nothing is made.

    Raises:
        ConfigError: the configuration.
        RunError: it is to come after a run that there is not, or that can't end well any more.
    """
    config = waiting = validated(config)
    if config.after is not None:  # jobs are asked about then, which other plans need not wait for
        from clusterrun.launch.submit import with_dependency

        waiting = with_dependency(config)
    return make_plan(waiting, next_run_id(config), excluded_nodes(config))


def excluded_nodes(config: RunConfig) -> list[str]:
    """Nodes on the cluster's list of refused ones. Simulated nodes are never listed."""
    if config.cluster.executor is not Executor.slurm or not config.preflight.exclude:
        return []
    return [entry.node for entry in exclusions.of(config).all()]
