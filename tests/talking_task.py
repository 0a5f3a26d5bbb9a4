"""The linear task, which says each of its steps on standard output, slowly enough to be watched."""

from __future__ import annotations

from torch import Tensor, nn

from clusterrun.train.task import Batch
from slow_task import SlowLinear


class TalkingLinear(SlowLinear):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss(model, batch)
        print(f"call {self._calls}", flush=True)
        return loss
