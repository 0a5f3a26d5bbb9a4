"""One attempt of one worker: put the parts together, resume, train. Imports torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from signal import Signals

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from clusterrun import fence
from clusterrun.checkpoint.cadence import Cadence, FailureRate
from clusterrun.checkpoint.retention import Keep
from clusterrun.checkpoint.state import Checkpointer
from clusterrun.checkpoint.store import CheckpointInfo, Store
from clusterrun.config import frozen
from clusterrun.config.batch import batch_sizes
from clusterrun.config.grace import save_grace_s
from clusterrun.config.schema import RunConfig
from clusterrun.errors import ConfigError
from clusterrun.ledger import Ledger
from clusterrun.pulse import Pulse
from clusterrun.rundir import RunDir
from clusterrun.train import mesh, sampler, snapshot
from clusterrun.train.data import load_data
from clusterrun.train.events import EventLog
from clusterrun.train.mesh import Place
from clusterrun.train.optim import make_optimizer
from clusterrun.train.polling import Poll
from clusterrun.train.precision import Precision
from clusterrun.train.profiling import Profiler
from clusterrun.train.recorder import Recorder
from clusterrun.train.rng import seed_everywhere
from clusterrun.train.sampler import Position
from clusterrun.train.saving import Saver
from clusterrun.train.stopping import StopFlag
from clusterrun.train.task import load_task
from clusterrun.train.trainer import Trainer

COLLECTIVE_TIMEOUT_S = 600.0  # at least: training's collectives must outlast a checkpoint that one rank waits for


@dataclass(frozen=True)
class Resumed:
    """Where training goes on. ``step`` is None at a fresh start; ``note`` is what is not as it was."""

    position: Position
    step: int | None
    note: str | None


def run(run_dir: RunDir, attempt: int, events: EventLog, flag: StopFlag) -> Signals | None:
    """Train to the end or to a stop signal, which is returned.

    Raises:
        ClusterrunError: something known is wrong; the message says what.
        Exception: the task's own code failed.
    """
    config = frozen.load(run_dir.config)
    place = mesh.join(config.cluster.accelerator, max(COLLECTIVE_TIMEOUT_S, config.checkpoint.timeout_s + 60))
    trainer = make_trainer(config, run_dir, attempt, place, events, flag)
    signal = trainer.run()
    trainer.recorder.close()
    dist.destroy_process_group()
    return signal


def make_trainer(
    config: RunConfig, run_dir: RunDir, attempt: int, place: Place, events: EventLog, flag: StopFlag
) -> Trainer:
    """Build the task, its data and the trainer, with the newest checkpoint's state. A collective."""
    if config.train.task is None:
        raise ConfigError("train.task: not given; a run with train.script has no worker of clusterrun's")
    batch = batch_sizes(config.train, place.world_size)
    recorder = Recorder(events, run_dir.tensorboard if config.train.tensorboard else None)
    task = load_task(config.train.task, config.train.task_args)
    data = load_data(config.data, config.seed, task.context, place.device)
    sampler.check_batch(len(data.train), batch.global_)
    seed_everywhere(config.seed)  # the same on all ranks, for the model's initial weights
    module = task.build_model(data.spec).to(place.device)
    optimizer = make_optimizer(module, config.train)
    precision = Precision(config.train.precision, place.device)
    seed_everywhere(config.seed, 1, place.rank)
    pulse = Pulse.of_this_worker()
    checkpointer = Checkpointer(
        store=Store(run_dir.checkpoints, guard=fence.guard(run_dir.fence, attempt)),
        attempt=attempt,
        config_hash=hashlib.sha256(run_dir.config.read_bytes()).hexdigest()[:16],
        keep=Keep.of(config.checkpoint),
        timeout_s=config.checkpoint.timeout_s,
        device=place.device,
        warn=recorder.warning,
    )
    found = checkpointer.find()
    attempts = Ledger(run_dir.ledger).attempts() if place.rank == 0 else []  # rank 0's clock decides when to save
    rate = FailureRate.of(config.checkpoint, attempts, place.world_size)
    resumed = _resume(found, config.seed, place, module, optimizer, precision)
    trainer = Trainer(
        config=config,
        place=place,
        task=task,
        data=data,
        batch=batch,
        module=module,
        optimizer=optimizer,
        precision=precision,
        saver=Saver(
            checkpointer=checkpointer,
            config=config.checkpoint,
            cadence=Cadence(config.checkpoint, rate),
            grace_s=save_grace_s(config),
            report=recorder.checkpoint,
            say=recorder.say,
            warn=recorder.warning,
            saved_step=resumed.step,
        ),
        recorder=recorder,
        poll=Poll(flag, place.device, pulse=pulse),
        position=resumed.position,
        pulse=pulse,
        profiler=Profiler.of(config.profile, run_dir.attempt(attempt), place.rank, place.device),
    )
    recorder.start(
        step=resumed.position.step,
        total_steps=trainer.total_steps,
        epoch=trainer.position.epoch,
        world_size=place.world_size,
        global_batch=batch.global_,
        batch_per_rank=batch.per_rank,
        micro_batch=batch.micro,
        accumulate=config.train.accumulate,
        grad_compression=config.train.grad_compression.value,
        train_samples=len(data.train),
        valid_samples=len(data.valid),
        parameters=sum(p.numel() for p in module.parameters()),
        device=str(place.device),
        backend=place.backend,
        torch=torch.__version__,
        resumed_from=resumed.step,
    )
    if resumed.note:
        recorder.warning(resumed.note)
    return trainer


def _resume(
    found: CheckpointInfo | None,
    seed: int,
    place: Place,
    module: nn.Module,
    optimizer: Optimizer,
    precision: Precision,
) -> Resumed:
    if found is None or found.manifest is None:
        return Resumed(Position(), None, None)
    trainer = found.manifest.trainer
    snapshot.restore(module, optimizer, found.path)
    if trainer["scaler"]:
        precision.scaler.load_state_dict(dict(trainer["scaler"]))
    note = None
    if found.manifest.world_size == place.world_size:
        snapshot.restore_random(place.rank, found.path, place.device)
    else:
        seed_everywhere(seed, 1 + found.step, place.rank)
        note = (
            f"{found.path.name} was written by {found.manifest.world_size} ranks, now there are {place.world_size}: "
            "random generators are seeded anew, and results differ from an undisturbed run's"
        )
    return Resumed(Position(found.step, trainer["epoch"], trainer["consumed"]), found.step, note)
