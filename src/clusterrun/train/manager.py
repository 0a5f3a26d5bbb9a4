"""Checkpoints for a training loop of your own: the same store, cadence, retention and promises as our trainer's.

    checkpoints = clusterrun.CheckpointManager(model, optimizer)
    for step in checkpoints.steps(10_000):
        train(step)

Imports torch.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from clusterrun import fence
from clusterrun.checkpoint import dcp
from clusterrun.checkpoint.cadence import Cadence, FailureRate
from clusterrun.checkpoint.retention import Keep, Score
from clusterrun.checkpoint.state import Checkpointer
from clusterrun.checkpoint.store import Store
from clusterrun.config import frozen
from clusterrun.config.grace import save_grace_s
from clusterrun.config.schema import CheckpointConfig, RunConfig
from clusterrun.config.validate import check_checkpoint
from clusterrun.errors import ConfigError
from clusterrun.ledger import Ledger
from clusterrun.pulse import Pulse, Stage
from clusterrun.rundir import RunDir
from clusterrun.train import snapshot
from clusterrun.train.events import EventLog
from clusterrun.train.polling import Poll
from clusterrun.train.recorder import Recorder
from clusterrun.train.saving import Saver, State
from clusterrun.train.stopping import script_flag

GROUPS = "extra/.optimizer_groups"


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class CheckpointManager:
    """Saves, resumes and stops a loop on all ranks together. Every rank makes one and makes the same calls.

    Saved are the model, the optimizer with its settings, Python's, numpy's and torch's random generators of each rank,
    and ``extra``. In a run of clusterrun the run's ``checkpoint.*`` settings hold and its directory is used.

    Args:
        model: on its device, bare or in DistributedDataParallel; the same on all ranks.
        optimizer: of the model's parameters.
        extra: what else has state_dict() and load_state_dict(): a scheduler, a sampler. Equal on all ranks; of numbers,
            text, lists, dicts and tensors.
        directory: where checkpoints go outside a run.
        settings: as ``checkpoint.*``, outside a run, e.g. every_steps=50, keep=2.

    Raises:
        ConfigError: no process group, no directory, a sharded model, wrong settings.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        extra: Mapping[str, Stateful] | None = None,
        directory: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("CheckpointManager: call torch.distributed.init_process_group() before, as for DDP")
        self._flag = script_flag()
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizer = optimizer
        self._extra = dict(extra or {})
        if any(isinstance(parameter, DTensor) for parameter in self._model.parameters()):
            raise ConfigError("CheckpointManager: a sharded model; use torch.distributed.checkpoint for it")
        self._rank = dist.get_rank()
        on_gpu = "nccl" in dist.get_backend()
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._saver, self._recorder = self._parts(directory, settings)
        self._pulse = Pulse.of_this_worker()
        self._poll = Poll(self._flag, self._device, pulse=self._pulse)
        self.stopped = False  #: whether the loop ended because it was told to

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps to be done, from where the newest checkpoint ends, up to ``total`` - 1.

        Between two of them it saves what is due. When the run is told to stop it saves and ends early, and ``stopped``
        is True; after the last step it saves too. A loop left by ``break`` is not saved.
        """
        step = self.resume()
        while step < total:
            yield step
            step += 1
            if step < total and self.step(step):
                return
        self.finish(step)

    def resume(self) -> int:
        """Load the newest checkpoint that is whole. Returns the steps that were done, 0 when there is none yet.

        Raises:
            CheckpointError: there are checkpoints, but none is valid or it is of another model.
        """
        found = self._saver.checkpointer.find()
        if found is None or found.manifest is None:
            return 0
        snapshot.restore(self._model, self._optimizer, found.path)
        objects: dict[str, Any] = dict.fromkeys([GROUPS, *self._extra_keys()])
        dcp.read(objects, found.path)
        for group, before in zip(self._optimizer.param_groups, objects[GROUPS], strict=True):
            group.update(before)
        for name, thing in self._extra.items():
            thing.load_state_dict(objects[f"extra/{name}"])
        if found.manifest.world_size == dist.get_world_size():
            snapshot.restore_random(self._rank, found.path, self._device)
        else:
            self._recorder.warning(
                f"{found.path.name} was written by {found.manifest.world_size} ranks, now there are "
                f"{dist.get_world_size()}: random generators stay as this script has seeded them"
            )
        self._saver.saved_step = found.step
        self._recorder.say(f"resumed from step {found.step}: {found.path}")
        return found.step

    def step(self, done: int) -> bool:
        """Call after each step with the number of steps done. Saves what is due; True: told to stop, and saved.

        Raises:
            CheckpointError: told to stop and not able to save, or too many saves failed (checkpoint.max_failed_saves).
        """
        due, by_steps = self._poll.tick(), self._saver.due_at(done)
        self._pulse.begin(done + 1, Stage.compute)
        if not (due or by_steps):
            return False
        self._flag.look()
        agreed = self._poll.agree(votes=self._saver.votes())
        by_time = self._saver.heard(agreed.votes)
        if agreed.signal is not None:
            self._save(done, "stop", last=True)
            self._recorder.stopped(done, agreed.signal.name)
            self._saver.require(done)
            self.stopped = True
            if path := os.environ.get("CLUSTERRUN_STOPPED_FILE"):
                Path(path).touch()
        elif by_steps or by_time:
            self._save(done, "every_steps" if by_steps else "time")
        return self.stopped

    def evaluated(self, done: int, loss: float, value: float = float("nan")) -> None:
        """Tell a validation result, equal on all ranks, for ``checkpoint.keep_best``: one of the best is saved."""
        if self._saver.would_be_among_the_best(done, Score(loss, value)):
            self._save(done, "best")

    def finish(self, done: int) -> None:
        """Save after the last step, and wait for it. Tried again for ``checkpoint.timeout_s``, then CheckpointError."""
        self._pulse.at(Stage.saving)
        self._saver.save_end(done, self._state)
        self._pulse.at(Stage.compute)

    def _save(self, done: int, reason: str, *, last: bool = False) -> None:
        self._pulse.at(Stage.saving)
        self._saver.save(done, reason, self._state, last=last)
        self._pulse.at(Stage.compute)
        self._poll.exclude_pause()

    def _state(self) -> State:
        snapshot.share_buffers(self._model)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        objects = {f"extra/{name}": thing.state_dict() for name, thing in self._extra.items()}
        shared = {**snapshot.take(self._model, self._optimizer), GROUPS: groups, **objects}
        return State(shared, snapshot.take_random(self._rank, self._device), {})

    def _extra_keys(self) -> list[str]:
        return [f"extra/{name}" for name in self._extra]

    def _parts(self, directory: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> tuple[Saver, Recorder]:
        """From the run that this script is part of, or else from the arguments."""
        root = os.environ.get("CLUSTERRUN_RUN_DIR")
        attempt = int(os.environ.get("CLUSTERRUN_ATTEMPT", "0"))
        events, attempts, config = Path(os.devnull), [], RunConfig()
        guard: Callable[[], None] = lambda: None  # noqa: E731
        if root is not None:
            run = RunDir.open(Path(root))
            config, text, place = frozen.load(run.config), run.config.read_bytes(), run.checkpoints
            guard = fence.guard(run.fence, attempt)
            if self._rank == 0:
                node = os.environ.get("CLUSTERRUN_NODE") or socket.gethostname()
                events, attempts = run.attempt(attempt).event_file(node, 0), Ledger(run.ledger).attempts()
        elif directory is not None:
            try:
                config.checkpoint = CheckpointConfig(**settings)
            except TypeError as error:
                raise ConfigError(f"CheckpointManager: {str(error).partition('__init__() ')[2]}") from None
            check_checkpoint(config.checkpoint)
            text, place = b"", Path(directory).expanduser().absolute()
        else:
            raise ConfigError("CheckpointManager: outside a run of clusterrun, say where: directory=...")
        recorder = Recorder(EventLog(events, self._rank), None)
        checkpointer = Checkpointer(
            store=Store(place, guard=guard),
            attempt=attempt,
            config_hash=hashlib.sha256(text).hexdigest()[:16],
            keep=Keep.of(config.checkpoint),
            timeout_s=config.checkpoint.timeout_s,
            device=self._device,
            warn=recorder.warning,
        )
        rate = FailureRate.of(config.checkpoint, attempts, dist.get_world_size())
        saver = Saver(
            checkpointer=checkpointer,
            config=config.checkpoint,
            cadence=Cadence(config.checkpoint, rate),
            grace_s=save_grace_s(config) if root is not None else float("inf"),
            report=recorder.checkpoint,
            say=recorder.say,
            warn=recorder.warning,
            saved_step=None,
        )
        return saver, recorder
