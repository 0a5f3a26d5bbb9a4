"""What a configuration must satisfy beyond its types. Messages name the field, the value and what would be right."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterrun.config.batch import batch_sizes
from clusterrun.config.checks import policies
from clusterrun.config.schema import (
    Accelerator,
    BenchConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    DataKind,
    Executor,
    GradCompression,
    NotifyConfig,
    PreflightConfig,
    ProfileTool,
    RecoveryConfig,
    RunConfig,
    SlurmConfig,
    TrainConfig,
)
from clusterrun.config.units import is_memory_size, time_limit_minutes
from clusterrun.errors import ConfigError
from clusterrun.rundir import default_shared_dir

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # never shared between hosts
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")

# Options of sbatch that clusterrun sets itself; cluster.slurm.extra must not fight with them.
OWNED_OPTIONS = {
    "nodes": "cluster.nodes and cluster.spare_nodes",
    "ntasks": "cluster.nodes (one task per node; torchrun starts the workers)",
    "ntasks-per-node": "cluster.nproc_per_node",
    "cpus-per-task": "cluster.cpus_per_proc",
    "gpus": "cluster.nproc_per_node",
    "gpus-per-node": "cluster.nproc_per_node and cluster.slurm.gpu_request",
    "gpus-per-task": "cluster.nproc_per_node",
    "gres": "cluster.slurm.gpu_request=gres",
    "time": "cluster.time_limit",
    "signal": "cluster.signal_lead_s",
    "requeue": "recovery.requeue",
    "no-requeue": "recovery.requeue",
    "job-name": "name",
    "output": "nothing: logs live in the run directory",
    "error": "nothing: logs live in the run directory",
    "open-mode": "nothing: logs are appended",
    "no-kill": "nothing: a lost node must not take the job down",
    "array": "a sweep (-m)",
    "wrap": "train=script",
}


def validated(config: RunConfig) -> RunConfig:
    """A copy with absolute paths, checked as a whole.

    Raises:
        ConfigError: the first thing found wrong.
    """
    config = dataclasses.replace(
        config,
        cluster=dataclasses.replace(
            config.cluster, shared_dir=_absolute(config.cluster.shared_dir or str(default_shared_dir()))
        ),
        train=dataclasses.replace(config.train, script=_absolute(config.train.script) if config.train.script else None),
        data=dataclasses.replace(config.data, path=_absolute(config.data.path) if config.data.path else None),
    )
    for path, text in _strings(config):
        if any(ord(c) < 32 or ord(c) == 127 for c in text):
            raise ConfigError(f"{path}={text!r}: holds a line break or control character")
    for path, text in [*_strings(config), *(("train.args", str(arg)) for arg in config.train.args)]:
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise ConfigError(f"{path}={text!r}: is not UTF-8 text, or holds a NUL")
    for field in ("name", "run_id"):
        value = getattr(config, field)
        if value is not None and not _NAME.fullmatch(value):
            raise ConfigError(
                f"{field}={value}: letters, digits, '.', '_' and '-', at most 80, starting with a letter or digit"
            )
    _between("seed", config.seed, 0, 2**32 - 1)
    _check_cluster(config.cluster)
    _check_slurm(config.cluster.slurm)
    _check_train(config.train)
    _check_exchange(config)
    _check_data(config.data, config.train)
    check_checkpoint(config.checkpoint)
    _check_preflight(config.preflight)
    _check_recovery(config.recovery)
    _check_profile(config)
    if config.sweep.array_parallelism is not None:
        _between("sweep.array_parallelism", config.sweep.array_parallelism, 1, 10**6)
    _check_bench(config.bench)
    _check_notify(config.notify)
    _between("snapshot_limit_mb", config.snapshot_limit_mb, 1, 10**6)
    if config.train.task is not None:
        batch_sizes(config.train, config.world_size)
    if config.cluster.min_nodes is not None and config.train.task is not None:
        try:
            batch_sizes(config.train, config.cluster.min_nodes * config.cluster.nproc_per_node)
        except ConfigError as error:
            raise ConfigError(f"cluster.min_nodes={config.cluster.min_nodes}: {error}") from None
    return config


def is_node_local(path: str) -> bool:
    """Whether a path lies on a file system that each host has to itself."""
    plain = os.path.normpath(path)
    return any(plain == top or plain.startswith(top + "/") for top in NODE_LOCAL)


def _check_cluster(cluster: ClusterConfig) -> None:
    if not _NAME.fullmatch(cluster.name or "unnamed"):
        raise ConfigError(f"cluster.name={cluster.name}: letters, digits, '.', '_' and '-' only")
    _between("cluster.nodes", cluster.nodes, 1, 100_000)
    _between("cluster.spare_nodes", cluster.spare_nodes, 0, 100_000)
    if cluster.min_nodes is not None:
        _between("cluster.min_nodes", cluster.min_nodes, 1, cluster.nodes)
    _between("cluster.nproc_per_node", cluster.nproc_per_node, 1, 1024)
    _between("cluster.gpus_per_node", cluster.gpus_per_node, 0, 1024)
    _between("cluster.cpus_per_proc", cluster.cpus_per_proc, 1, 4096)
    if cluster.accelerator is Accelerator.cuda and cluster.nproc_per_node > cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.nproc_per_node={cluster.nproc_per_node}: more workers than GPUs "
            f"(cluster.gpus_per_node={cluster.gpus_per_node}); give at most {cluster.gpus_per_node}, "
            "or set cluster.accelerator=cpu"
        )
    if cluster.executor is Executor.local and cluster.spare_nodes:
        raise ConfigError(
            f"cluster.spare_nodes={cluster.spare_nodes}: simulated nodes of one machine have no spares; set it to 0"
        )
    if cluster.time_limit is not None:
        try:
            minutes = time_limit_minutes(cluster.time_limit)
        except ValueError as error:
            raise ConfigError(f"cluster.time_limit={cluster.time_limit}: {error}") from None
        if minutes > 366 * 24 * 60:
            raise ConfigError(f"cluster.time_limit={cluster.time_limit}: must be at most 366d")
    _between("cluster.signal_lead_s", cluster.signal_lead_s, 1, 24 * 3600)
    if (
        cluster.executor is Executor.slurm
        and cluster.nodes + cluster.spare_nodes > 1
        and not cluster.local_paths_shared
        and is_node_local(cluster.shared_dir)
    ):
        raise ConfigError(
            f"cluster.shared_dir={cluster.shared_dir}: node-local, the other nodes would not see it; "
            "use a path on shared storage (NFS, Lustre, ...), e.g. below your home directory"
        )
    wiring = cluster.interconnect
    for name in ("nvlinks_per_pair", "nics_per_node"):
        value = getattr(wiring, name)
        if value is not None:
            _between(f"cluster.interconnect.{name}", value, 0, 1024)
    if wiring.nic_gbit_per_s is not None and not wiring.nic_gbit_per_s > 0:
        raise ConfigError(f"cluster.interconnect.nic_gbit_per_s={wiring.nic_gbit_per_s}: must be above 0 (Gbit/s)")
    for name in cluster.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"cluster.env.{name}: not a name for an environment variable")


def _check_slurm(slurm: SlurmConfig) -> None:
    given = [name for name in ("mem", "mem_per_cpu", "mem_per_gpu") if getattr(slurm, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"cluster.slurm.{' and cluster.slurm.'.join(given)}: Slurm takes only one of them")
    for name in given:
        if not is_memory_size(getattr(slurm, name)):
            raise ConfigError(f"cluster.slurm.{name}={getattr(slurm, name)}: not a size; write 200G, 4000M or 0 (all)")
    for name in ("partition", "account", "qos", "reservation", "exclude", "nodelist", "gpu_type", "mail_type", "wckey"):
        value = getattr(slurm, name)
        if value is not None and (not value or re.search(r"\s", value)):
            raise ConfigError(f"cluster.slurm.{name}={value!r}: empty or with blanks; set it to null to leave it out")
    for option, value in slurm.extra.items():
        plain = str(option).lstrip("-").replace("_", "-")
        if plain in OWNED_OPTIONS:
            raise ConfigError(
                f"cluster.slurm.extra.{option}: clusterrun sets --{plain} itself, from {OWNED_OPTIONS[plain]}"
            )
        if not re.fullmatch(r"[a-z][a-z0-9-]+", plain):
            raise ConfigError(f"cluster.slurm.extra.{option}: not the long name of an sbatch option, e.g. switches")
        own = plain.replace("-", "_")
        if own in {f.name for f in dataclasses.fields(SlurmConfig)}:
            raise ConfigError(f"cluster.slurm.extra.{option}: has a setting of its own; use cluster.slurm.{own}")
        if value is not None and not isinstance(value, (str, int, float)):
            raise ConfigError(f"cluster.slurm.extra.{option}={value}: must be one text, number, true or false")


def _check_train(train: TrainConfig) -> None:
    if not _NAME.fullmatch(train.name):
        raise ConfigError(f"train.name={train.name}: letters, digits, '.', '_' and '-' only")
    if train.task is not None and train.script is not None:
        raise ConfigError(
            f"train.task={train.task} and train.script={train.script}: give one; train=script sets task to null"
        )
    if train.task is None:
        if train.script is None:
            raise ConfigError("train.script: must be given with train=script, e.g. train.script=my.py")
        if not Path(train.script).is_file():
            raise ConfigError(f"train.script={train.script}: no such file")
    elif train.args:
        raise ConfigError(f"train.args={train.args}: only for train=script; a task takes train.task_args")
    _between("train.epochs", train.epochs, 1, 10**9)
    for name in ("max_steps", "batch_per_rank", "global_batch", "validate_every_steps"):
        value = getattr(train, name)
        if value is not None:
            _between(f"train.{name}", value, 1, 10**12)
    _between("train.accumulate", train.accumulate, 1, 10**6)
    _between("train.log_every_steps", train.log_every_steps, 1, 10**9)
    _between("train.warmup_steps", train.warmup_steps, 0, 10**12)
    _between("train.max_restarts", train.max_restarts, 0, 1000)
    _between("train.rendezvous_timeout_s", train.rendezvous_timeout_s, 5, 24 * 3600)
    _between("train.lr", train.lr, 0, 1e6)
    _between("train.momentum", train.momentum, 0, 1)
    _between("train.weight_decay", train.weight_decay, 0, 1e6)
    if train.clip_grad_norm is not None and not train.clip_grad_norm > 0:
        raise ConfigError(f"train.clip_grad_norm={train.clip_grad_norm}: must be above 0, or null for no clipping")


def _check_exchange(config: RunConfig) -> None:
    """How gradients travel."""
    train = config.train
    if train.bucket_mb is not None:
        _between("train.bucket_mb", train.bucket_mb, 0.001, 2**20)
    if train.script is not None and (train.bucket_mb is not None or train.grad_compression is not GradCompression.none):
        name = "bucket_mb" if train.bucket_mb is not None else "grad_compression"
        raise ConfigError(
            f"train.{name}: a script wraps its own model; give DistributedDataParallel bucket_cap_mb, or register its "
            "communication hook, there"
        )
    if train.grad_compression is GradCompression.bf16 and config.cluster.accelerator is Accelerator.cpu:
        raise ConfigError(
            "train.grad_compression=bf16: torch's hook needs NCCL, and cluster.accelerator=cpu uses Gloo; use fp16"
        )


def _check_data(data: DataConfig, train: TrainConfig) -> None:
    _between("data.samples", data.samples, 1, 10**9)
    if not 0 < data.holdout < 1:
        raise ConfigError(f"data.holdout={data.holdout}: the share kept for validation, between 0 and 1, e.g. 0.2")
    if train.task is None or data.kind not in (DataKind.idx, DataKind.text):
        return
    what = "directory" if data.kind is DataKind.idx else "file"
    if data.path is None:
        raise ConfigError(f"data.path: data={data.kind.value} needs the {what} to read, e.g. data.path=/data/set")
    path = Path(data.path)
    if not (path.is_dir() if data.kind is DataKind.idx else path.is_file()):
        raise ConfigError(f"data.path={data.path}: no such {what}")


def check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Raises ConfigError."""
    for name in ("every_steps", "keep_every_steps", "max_failed_saves"):
        value = getattr(checkpoint, name)
        if value is not None:
            _between(f"checkpoint.{name}", value, 1, 10**12)
    for name in ("every_minutes", "mtbf_h"):
        value = getattr(checkpoint, name)
        if value is not None and not 0 < value <= 10**6:
            raise ConfigError(f"checkpoint.{name}={value}: must be above 0 and at most 1_000_000")
    if checkpoint.auto:
        for name in ("every_steps", "every_minutes"):
            if (value := getattr(checkpoint, name)) is not None:
                raise ConfigError(
                    f"checkpoint.auto=true with checkpoint.{name}={value}: auto chooses the distance itself; "
                    f"use checkpoint=auto, or set checkpoint.{name}=null"
                )
    elif checkpoint.mtbf_h is not None:
        raise ConfigError(f"checkpoint.mtbf_h={checkpoint.mtbf_h}: only checkpoint.auto=true uses it")
    if checkpoint.keep < 2:
        raise ConfigError(
            f"checkpoint.keep={checkpoint.keep}: keep at least 2, so that a damaged one has a predecessor"
        )
    _between("checkpoint.keep_best", checkpoint.keep_best, 0, 10**6)
    _between("checkpoint.timeout_s", checkpoint.timeout_s, 1, 24 * 3600)


def _check_preflight(preflight: PreflightConfig) -> None:
    _between("preflight.timeout_s", preflight.timeout_s, 1, 24 * 3600)
    _between("preflight.max_clock_skew_s", preflight.max_clock_skew_s, 0, 24 * 3600)
    _between("preflight.visible_within_s", preflight.visible_within_s, 0, 3600)
    wanted = preflight.min_driver
    if wanted is not None and not re.fullmatch(r"\d+(\.\d+)*", wanted):
        raise ConfigError(f"preflight.min_driver={wanted}: not a driver version; write it as 535.104")
    _between("preflight.exclude_for_h", preflight.exclude_for_h, 0, 24 * 366)
    _between("preflight.slow_timeout_s", preflight.slow_timeout_s, 1, 3600)
    if preflight.slow_below is not None:
        _between("preflight.slow_below", preflight.slow_below, 0, 1)
    policies(preflight.policy)


def _check_profile(config: RunConfig) -> None:
    profile = config.profile
    if profile.steps and not (len(profile.steps) == 2 and 1 <= profile.steps[0] <= profile.steps[1]):
        raise ConfigError(f"profile.steps={profile.steps}: the first and the last step, from 1 on, e.g. [10,15]")
    for rank in profile.ranks if profile.steps or profile.tool is ProfileTool.nsys else ():
        if not 0 <= rank < config.world_size:
            raise ConfigError(f"profile.ranks={profile.ranks}: there are ranks 0 to {config.world_size - 1}")
    if profile.steps and config.train.script is not None:
        raise ConfigError(
            f"profile.steps={profile.steps}: a script's steps are its own; use profile.tool=nsys without steps"
        )


def _check_recovery(recovery: RecoveryConfig) -> None:
    _between("recovery.max_stalled_attempts", recovery.max_stalled_attempts, 1, 1000)
    for name in ("hang_factor", "straggler_factor"):
        value = getattr(recovery, name)
        if value != 0:
            _between(f"recovery.{name} (0: off)", value, 1, 1e6)
    _between("recovery.hang_floor_s", recovery.hang_floor_s, 1, 7 * 24 * 3600)
    _between("recovery.hang_warmup_steps", recovery.hang_warmup_steps, 0, 10**6)
    _between("recovery.hang_start_s", recovery.hang_start_s, 1, 7 * 24 * 3600)
    _between("recovery.straggler_for_s", recovery.straggler_for_s, 0, 7 * 24 * 3600)
    _between("recovery.heartbeat_s", recovery.heartbeat_s, 0.2, 3600)


def _check_notify(notify: NotifyConfig) -> None:
    name = notify.webhook_env
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(
            "notify.webhook_env: takes the name of an environment variable that holds the URL, not the URL itself, "
            "e.g. notify.webhook_env=MY_WEBHOOK"
        )
    _between("notify.timeout_s", notify.timeout_s, 0.1, 60)


def _check_bench(bench: BenchConfig) -> None:
    if bench.tool not in ("torch", "nccl-tests"):
        raise ConfigError(f"bench.tool={bench.tool}: must be torch or nccl-tests")
    _between("bench.iterations", bench.iterations, 3, 10**6)
    _between("bench.warmup", bench.warmup, 0, 10**6)
    _between("bench.seconds_per_size", bench.seconds_per_size, 0, 3600)
    _between("bench.timeout_s", bench.timeout_s, 1, 24 * 3600)


def _between(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{field}={value}: must be from {low:,} to {high:,}".replace(",", "_"))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _strings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every string of a configuration with its dotted path (train.args may hold anything: it never meets a shell)."""
    if isinstance(value, str):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            if not (isinstance(value, TrainConfig) and f.name == "args"):
                yield from _strings(getattr(value, f.name), f"{path}.{f.name}".lstrip("."))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key, f"{path}.{key}")
            yield from _strings(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _strings(item, f"{path}[{number}]")
