"""The linear task, which says each of its steps on standard output, and dawdles until it is told to hurry."""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor, nn

from clusterrun.train.task import Batch
from slow_task import SlowLinear

DAWDLE_AFTER, DAWDLE_S = 15, 0.5


class TalkingLinear(SlowLinear):
    def __init__(self, hurry: str, delay_s: float = 0.0) -> None:
        """``hurry``: once this file is there, steps are quick."""
        super().__init__(delay_s)
        self._hurry = Path(hurry)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._calls >= DAWDLE_AFTER and not self._hurry.exists():
            time.sleep(DAWDLE_S)  # a busy machine must not let the run end before it was watched
        loss = super().loss(model, batch)
        print(f"call {self._calls}", flush=True)
        return loss
