"""Times of training steps, without making the GPU wait: marks are read only after the ranks' next agreement."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Clock:
    """Points in time: on a GPU an event in its stream, else the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks; waits until the GPU has reached the second."""
        if self.on_gpu:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000
        return float(end - start)


@dataclass(frozen=True)
class Communication:
    """Gradient communication of one step, in seconds; None when DDP timed none.

    Attributes:
        all_s: from the first bucket's start to the last one's end.
        exposed_s: the part after this rank had computed all its gradients: it waited for the network, or for others.
    """

    all_s: float | None = None
    exposed_s: float | None = None


@dataclass
class PendingStep:
    """A step to be logged, with what will be known only after the ranks agree. ``loss`` is this rank's mean."""

    step: int
    epoch: int
    lr: float
    loss: Tensor
    steps: int  # steps since ``start``
    start: Any
    end: Any
    data_s: float


class CommunicationTimer:
    """Gradient communication as DDP times it by itself, in one of ``every`` iterations and the first ten."""

    def __init__(self, model: DistributedDataParallel, every: int) -> None:
        model._set_ddp_runtime_logging_sample_rate(max(1, every))  # type: ignore[no-untyped-call]
        assert model.logger is not None  # every DDP model has one
        self._logger = model.logger
        self._seen: int | None = None

    def newest(self) -> Communication:
        """The last timed iteration's, when one was timed since the last call."""
        timed = self._logger._get_ddp_logging_data().ints_map  # without the texts beside them: half the time
        iteration, nanoseconds = timed.get("iteration"), timed.get("backward_comm_time")
        if not nanoseconds or iteration == self._seen:
            return Communication()
        self._seen = iteration
        overlap = timed.get("backward_compute_comm_overlap_time") or 0
        return Communication(float(nanoseconds) / 1e9, max(0.0, float(nanoseconds - overlap) / 1e9))
