"""Where training reports to: the event file of each rank; on rank 0 also standard output and TensorBoard."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, TextIO

from clusterrun.checkpoint.state import Saved
from clusterrun.errors import ConfigError
from clusterrun.train.events import EventLog


class Recorder:
    """Writes what happened. ``step`` events come from every rank, the rest of the running report from rank 0 alone."""

    def __init__(self, events: EventLog, tensorboard: Path | None) -> None:
        self.events, self.rank = events, events.rank
        self._directory = tensorboard if self.rank == 0 else None
        self._board: Any = None
        if self._directory is not None:
            _writer_class()  # now, not after the data is loaded

    def start(self, **fields: Any) -> None:
        self.events.write("start", **fields)
        if self._directory is not None:
            # purge_step: what an earlier attempt logged beyond the checkpoint is logged again
            self._board = _writer_class()(str(self._directory), purge_step=fields["step"] + 1)
        begun = "fresh start" if fields["resumed_from"] is None else f"resumed from step {fields['resumed_from']}"
        self.say(
            f"{begun}: {fields['total_steps']} steps of {fields['global_batch']} samples on {fields['world_size']} "
            f"rank(s), {fields['parameters']} parameters, {fields['device']}, {fields['backend']}"
        )

    def ready(self, step: int) -> None:
        if self.rank == 0:
            self.events.write("ready", step=step)

    def buckets(self, step: int, sizes: list[int]) -> None:
        """Bytes of the gradient buckets as they are now, before any compression."""
        if self.rank == 0:
            self.events.write("buckets", step=step, bytes=sizes)

    def steps(self, rows: list[dict[str, Any]]) -> None:
        """Logged steps, in order; the last also on standard output, where hundreds of lines a second help nobody."""
        self.events.write_all("step", rows)
        last = rows[-1]
        self.say(
            f"step {last['step']}  loss {last['loss']:.4f}  lr {last['lr']:.3g}  "
            f"{last['samples_per_s']:.0f} samples/s  {last['step_time_s'] * 1000:.1f} ms/step"
        )
        if self._board is not None:
            for row in rows:
                for name in ("loss", "lr", "samples_per_s", "step_time_s", "data_time_s", "comm_time_s"):
                    self._scalar(f"train/{name}", row[name], row["step"])

    def evaluated(self, step: int, loss: float, metric: str, value: float) -> None:
        if self.rank == 0:
            self.events.write("eval", step=step, loss=loss, metric=metric, value=value)
            self.say(f"step {step}  validation loss {loss:.4f}  {metric} {value:.4f}")
            self._scalar("valid/loss", loss, step)
            self._scalar(f"valid/{metric}", value, step)

    def checkpoint(self, saved: Saved, reason: str) -> None:
        if self.rank != 0:
            return
        fields = {"ok": saved.ok, "path": saved.path, "seconds": saved.seconds, "stall_s": saved.stall_s}
        self.events.write(
            "checkpoint", step=saved.step, **fields, bytes=saved.bytes, reason=reason, problem=saved.problem
        )
        if saved.ok:
            waited = "" if saved.stall_s == saved.seconds else f" ({saved.stall_s:.2f} s of training)"
            self.say(f"step {saved.step}  checkpoint saved in {saved.seconds:.2f} s{waited}: {saved.path}")

    def warning(self, message: str) -> None:
        """Something went wrong that does not end training. Rank 0 only."""
        if self.rank == 0:
            self.events.write("warning", step=self.events.step, message=message)
            tell(f"warning: {message}", sys.stderr)

    def stopped(self, step: int, signal: str) -> None:
        self.events.write("stopped", step=step, signal=signal)
        self.say(f"stopped by {signal} after step {step}")

    def done(self, step: int, **fields: Any) -> None:
        self.events.write("done", step=step, **fields)
        self.say(f"done after step {step}: {fields['metric']} {fields['value']:.4f}")

    def say(self, text: str) -> None:
        """One line for people, on rank 0's standard output."""
        if self.rank == 0:
            tell(text, sys.stdout)

    def close(self) -> None:
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()
        self.events.close()

    def _scalar(self, name: str, value: float | None, step: int) -> None:
        if self._board is None or value is None:
            return
        try:
            self._board.add_scalar(name, value, step)
        except OSError as error:
            self._board = None
            self.warning(f"TensorBoard's file can't be written, so nothing more goes there: {error.strerror}")


def tell(text: str, stream: TextIO) -> None:
    """A line for people. They are often files on the run's disk, and a full disk must not end the training."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "train.tensorboard=true: the package tensorboard is not installed; pip install 'clusterrun[tensorboard]'"
        ) from None
    return SummaryWriter
