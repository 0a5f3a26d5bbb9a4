"""The training loop. It knows about batches, steps, stopping and saving; what is computed is the task's business.

Promise: a run that is stopped and resumed any number of times ends with the same bits as one that was not (same world
size, hardware and software). Three things make it so: everything that a step depends on is in the checkpoint or follows
from the configuration; validation leaves no trace; and every attempt begins with a warm-up, after which DDP has its
final gradient buckets. Without it the first step after a resume adds up gradients in other buckets, in another order.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from signal import Signals
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clusterrun.checkpoint.retention import Score
from clusterrun.config.batch import BatchSizes
from clusterrun.config.schema import RunConfig
from clusterrun.pulse import Pulse, Stage
from clusterrun.train import sampler, snapshot
from clusterrun.train.data import Data
from clusterrun.train.exchange import bucket_bytes, distributed
from clusterrun.train.mesh import Place
from clusterrun.train.optim import learning_rate, set_learning_rate
from clusterrun.train.polling import Poll
from clusterrun.train.precision import Precision
from clusterrun.train.profiling import Profiler
from clusterrun.train.recorder import Recorder
from clusterrun.train.rng import preserved_rng
from clusterrun.train.sampler import Position
from clusterrun.train.saving import Saver, State
from clusterrun.train.stepclock import Clock, CommunicationTimer, PendingStep
from clusterrun.train.task import Batch, Task
from clusterrun.train.validation import validate


@dataclass
class Trainer:
    """One attempt to train from ``position`` to the end. Every rank makes the same one and calls ``run``.

    Attributes:
        module: the bare model on its device, with the state of ``position``.
    """

    config: RunConfig
    place: Place
    task: Task
    data: Data
    batch: BatchSizes
    module: nn.Module
    optimizer: Optimizer
    precision: Precision
    saver: Saver
    recorder: Recorder
    poll: Poll
    position: Position
    pulse: Pulse
    profiler: Profiler | None = None  # of this rank

    def __post_init__(self) -> None:
        train, self._samples = self.config.train, len(self.data.train)
        self.total_steps = sampler.total_steps(
            self.position, self._samples, self.batch.global_, train.epochs, train.max_steps
        )
        self.position.begin_epoch_if_ended(self._samples, self.batch.global_)
        device = self.place.device
        self.model = distributed(self.module, self.place, train)
        self._trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._clock = Clock(device)
        self._communication = CommunicationTimer(self.model, train.log_every_steps)
        self._pending: list[PendingStep] = []
        self._order: tuple[int, Tensor] | None = None
        self._rate: float | None = None
        self._score: Score | None = None
        self._save_due = False  # by the clock; the ranks agreed on it
        self._told_buckets = False
        self._begin_window()

    def run(self) -> Signals | None:
        """Train to the end, or to where the ranks agreed to stop: then the signal. State is saved in both cases."""
        self.model.train()  # type: ignore[no-untyped-call]
        if self.position.step < self.total_steps:
            self.warm_up()
        signal = self._agree()
        if signal is None and self._validation_due():
            signal = self._validate()
        if signal is None and self.position.step < self.total_steps:
            self.recorder.ready(self.position.step)
            self._begin_window()
        while signal is None and self.position.step < self.total_steps:
            if self.profiler is not None:
                self.profiler.before(self.position.step + 1)
            self._step()
            signal = self._after_step()
        self._end_profile()
        if signal is None and self.position.step == self.total_steps:
            self.pulse.at(Stage.saving)
            self.saver.save_end(self.position.step, self._state)  # tries again what failed: there is no later save
        if signal is not None:
            self._save("stop", last=True)
            self.recorder.stopped(self.position.step, signal.name)
            self.saver.require(self.position.step)
        elif self._score is not None:
            done = {"loss": self._score.loss, "metric": self.task.metric, "value": self._score.value}
            self.recorder.done(self.position.step, **done, saved_step=self.saver.saved_step)
        return signal

    def _end_profile(self) -> None:
        if self.profiler is None:
            return
        self.profiler.stop()
        if self.profiler.problem:
            self.recorder.warning(self.profiler.problem)
        elif self.profiler.written:
            self.recorder.say(
                f"profile of steps {self.profiler.first} to {self.profiler.last}: {self.profiler.written}"
            )

    def warm_up(self) -> None:
        """A forward and backward pass whose only effect is that DDP builds its final gradient buckets."""
        batch = self._micro_batches()[0]
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        with preserved_rng(self.place.device):
            self._gradients(batch)
        self._drop_gradients()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    def _step(self) -> None:
        """One optimizer step. For a tiny model every line here is a measurable part of it."""
        began = time.perf_counter()
        self.pulse.begin(self.position.step + 1)
        batches = self._micro_batches()
        self._data_s += time.perf_counter() - began
        train, position = self.config.train, self.position
        rate = learning_rate(position.step, self.total_steps, train)
        if rate != self._rate:
            set_learning_rate(self.optimizer, rate)
            self._rate = rate
        self._drop_gradients()
        loss = self._gradients(batches[0]) if len(batches) == 1 else self._accumulated_gradients(batches)
        if train.clip_grad_norm is not None:
            self.precision.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), train.clip_grad_norm)
        self.precision.step(self.optimizer)
        epoch = position.epoch
        position.advance(self._samples, self.batch.global_)
        self._window_steps += 1
        if position.step % train.log_every_steps == 0 or position.step in (1, self.total_steps):
            self._remember(position.step, epoch, rate, loss)

    def _drop_gradients(self) -> None:
        """What ``zero_grad(set_to_none=True)`` does, without its entry in profiles, which takes longer."""
        for parameter in self._trained:
            parameter.grad = None

    def _gradients(self, batch: Batch, share: int = 1) -> Tensor:
        """Add a batch's gradients, over ``share``, to what is there. Returns its mean loss, over ``share``."""
        self.pulse.at(Stage.compute)
        if self.precision.dtype is None:
            loss = self.task.loss(self.model, batch)
        else:
            with self.precision.autocast():
                loss = self.task.loss(self.model, batch)
        if share > 1:
            loss = loss / share
        self.pulse.at(Stage.exchange)
        self.precision.backward(loss)
        return loss

    def _accumulated_gradients(self, batches: list[Batch]) -> Tensor:
        """The same over several micro-batches; only the last one's backward pass communicates."""
        with self.model.no_sync():
            losses = [self._gradients(batch, len(batches)).detach() for batch in batches[:-1]]
        losses.append(self._gradients(batches[-1], len(batches)).detach())
        return torch.stack(losses).sum()

    def _after_step(self) -> Signals | None:
        """What is due at this step boundary. Saving comes before validation, which a resumed run repeats."""
        due = self.poll.tick()
        step = self.position.step
        end, by_steps = step == self.total_steps, self.saver.due_at(step)
        validation = self._validation_due()
        signal = None
        if due or end or by_steps or validation:
            signal = self._agree()  # also writes the pending events before a save
            if end or by_steps or self._save_due:
                self._save("end" if end else "every_steps" if by_steps else "time", last=end)
        if validation and signal is None:
            signal = self._validate()
        return signal

    def _validation_due(self) -> bool:
        step, every = self.position.step, self.config.train.validate_every_steps
        if step == self.total_steps:
            return True
        return step > 0 and step % every == 0 if every else self.position.at_epoch_end

    def _validate(self) -> Signals | None:
        self.pulse.at(Stage.validation)
        step, batch = self.position.step, self.batch.micro
        score = validate(self.task, self.module, self.data.valid, batch, self.place, self.poll, self.precision)
        self._begin_window()
        if isinstance(score, Signals):
            return score
        self._score = score
        self.recorder.evaluated(step, score.loss, self.task.metric, score.value)
        if self.saver.would_be_among_the_best(step, score):
            self._save("best")
        return None

    def _save(self, reason: str, *, last: bool = False) -> None:
        """Save this step, unless it is saved. ``last``: nothing may be left in the background."""
        self.pulse.at(Stage.saving)
        self.saver.save(self.position.step, reason, self._state, last=last)
        self.pulse.tick()
        self._forget_pause()

    def _state(self) -> State:
        snapshot.share_buffers(self.module)
        rest = {
            "epoch": self.position.epoch,
            "consumed": self.position.consumed,
            "global_batch": self.batch.global_,
            "total_steps": self.total_steps,
            "scaler": self.precision.scaler.state_dict(),
        }
        own = snapshot.take_random(self.place.rank, self.place.device)
        return State(snapshot.take(self.module, self.optimizer), own, rest)

    def _forget_pause(self) -> None:
        """What was just done was no training: it counts neither for the poll nor for step times."""
        self.poll.exclude_pause()
        self._begin_window()

    def _micro_batches(self) -> list[Batch]:
        """This rank's part of the next global batch."""
        samples, epoch, micro = self.data.train, self.position.epoch, self.batch.micro
        if self._order is None or self._order[0] != epoch:
            order = sampler.epoch_order(self.config.seed, epoch, self._samples)
            self._order = epoch, torch.from_numpy(order).to(self.place.device)
        part = self._order[1][sampler.rank_slice(self.position, self.place.rank, self.batch.per_rank)]
        if micro == self.batch.per_rank:
            return [samples.batch(part)]
        return [samples.batch(indices) for indices in torch.split(part, micro)]

    def _begin_window(self) -> None:
        """Start measuring step times anew: what went before (validation, a save) is no training step."""
        self._window_start, self._window_steps, self._data_s = self._clock.mark(), 0, 0.0

    def _remember(self, step: int, epoch: int, rate: float, loss: Tensor) -> None:
        """Keep what is to be logged of a step until the ranks agree next: reading the loss now would stop the GPU."""
        pending = PendingStep(
            step=step,
            epoch=epoch,
            lr=rate,
            loss=loss.detach(),
            steps=self._window_steps,
            start=self._window_start,
            end=self._clock.mark(),
            data_s=self._data_s,
        )
        self._pending.append(pending)
        self._window_start, self._window_steps, self._data_s = pending.end, 0, 0.0

    def _agree(self) -> Signals | None:
        """Poll, and log what was waiting for it. A stop signal that any rank received, or None."""
        agreed = self.poll.agree([pending.loss for pending in self._pending], self.saver.votes())
        if self._pending:
            self._log(agreed.losses)
        flying = self.saver.in_flight
        self._save_due = self.saver.heard(agreed.votes)
        if flying and not self.saver.in_flight:
            self._forget_pause()
        return agreed.signal

    def _log(self, losses: list[float]) -> None:
        """Write the steps that were waiting, with their losses. What DDP timed last goes to the last of them."""
        rows: list[dict[str, Any]] = []
        for pending, loss in zip(self._pending, losses, strict=True):
            step_s = self._clock.seconds(pending.start, pending.end) / pending.steps
            data_s = pending.data_s / pending.steps
            row = {
                "step": pending.step,
                "epoch": pending.epoch,
                "loss": loss,
                "lr": pending.lr,
                "samples_per_s": self.batch.global_ / step_s,
                "step_time_s": step_s,
                "data_time_s": data_s,
                "comm_time_s": None,
                "own_time_s": None,
            }
            rows.append(row)
        comm = self._communication.newest()
        if comm.exposed_s is not None:
            own_s = max(0.0, step_s - comm.exposed_s)
            self.pulse.pace(own_s, data_s)
            row.update(comm_time_s=comm.all_s, own_time_s=own_s)
        self.recorder.steps(rows)
        if not self._told_buckets and (sizes := bucket_bytes(self.model)):
            self._told_buckets = True
            self.recorder.buckets(pending.step, sizes)
        self._pending.clear()
