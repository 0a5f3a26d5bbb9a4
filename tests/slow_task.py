"""The linear task with a pause in each step: the same numbers, at a speed that leaves a test time to interfere."""

from __future__ import annotations

import time

from torch import Tensor, nn

from clusterrun.train.task import Batch
from clusterrun.train.tasks import Linear


class SlowLinear(Linear):
    def __init__(self, delay_s: float = 0.0, fail_at: int | None = None) -> None:
        self._delay_s = delay_s
        self._fail_at = fail_at
        self._calls = 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._calls += 1
        if self._calls == self._fail_at:
            raise ValueError("the test task was told to fail here")
        time.sleep(self._delay_s)
        return super().loss(model, batch)
