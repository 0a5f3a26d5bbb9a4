"""What happens in training, as JSON lines: one file per rank and attempt, one line per event, each in one write.

Every event has ``t`` (Unix time, seconds), ``kind`` and ``rank``. Kinds and their fields:
    start       step, total_steps, epoch, world_size, global_batch, batch_per_rank, micro_batch, accumulate,
                train_samples, valid_samples, parameters, device, backend, torch, resumed_from (step or null)
    ready       step                       rank 0; the first real step begins
    step        step, epoch, loss, lr, samples_per_s, step_time_s, data_time_s, comm_time_s, own_time_s
                loss: mean over ranks in that step. Times: mean per step of this rank since the last step event.
                comm_time_s: gradient communication in the last step DDP timed, null when it timed none since
                own_time_s: step_time_s without the wait for others' gradients in that step; tells a straggler
                both null but in the last of the steps written together, which is about every 0.25 s
    eval        step, loss, metric, value  rank 0
    checkpoint  step, ok, path, seconds, stall_s, bytes, reason, problem   rank 0
                reason: every_steps, time, best, stop, end; problem: what went wrong when not ok, else null
                written when the save has ended, which with async_save is later than its step
    warning     step, message              rank 0
    stopped     step, signal
    done        step, loss, metric, value, saved_step
    error       step, type, message
Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events to a file. A full disk loses events, not the training: it is warned of once."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._size = self._drop_broken_tail()
        self._warned = False
        self.step: int | None = None  # the last one written about

    def write(self, kind: str, **fields: Any) -> None:
        self.write_all(kind, [fields])

    def write_all(self, kind: str, rows: list[dict[str, Any]]) -> None:
        """Several events of one kind, in one write."""
        step = rows[-1].get("step")
        if step is not None:
            self.step = max(step, self.step or 0)
        common = {"t": round(time.time(), 6), "kind": kind, "rank": self.rank}
        data = "".join([json.dumps({**common, **row}) + "\n" for row in rows]).encode()
        try:
            written = os.pwrite(self._fd, data, self._size)
            if written != len(data):
                raise OSError(0, "only part of a line could be written")
            self._size += written
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            if not self._warned:
                self._warned = True
                with contextlib.suppress(OSError):
                    print(f"warning: {self.path}: events are lost: {error.strerror}", file=sys.stderr, flush=True)

    def error(self, error: BaseException) -> None:
        """What ended this worker, with the last step it reported."""
        self.write("error", step=self.step, type=type(error).__name__, message=str(error))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _drop_broken_tail(self) -> int:
        """A worker killed while writing leaves half a line, which would make the next one unreadable too."""
        size = os.fstat(self._fd).st_size
        end = size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            os.ftruncate(self._fd, end)
        return end
