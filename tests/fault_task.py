"""A task whose numbers depend on everything that must survive (dropout, momentum, order of samples).

Its speed and size leave the fault matrix time to hit it where it wants.
"""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterrun.train.task import Batch, DataSpec, Sums
from clusterrun.train.tasks import Mlp


class FaultTask(Mlp):
    """``delay_s``: of a step. ``validate_s``: of a validation batch. ``ballast_mb``: added to each checkpoint.
    ``hang_rank``, ``hang_call``, ``once``: this rank sleeps for ever in that call of loss(), unless the file is there.
    ``die_call``: rank 1 kills itself in that call. ``slow_rank``, ``slow_s``: this rank takes so much longer."""

    def __init__(
        self,
        delay_s: float = 0.0,
        validate_s: float = 0.0,
        ballast_mb: int = 0,
        hang_rank: int | None = None,
        hang_call: int = 0,
        once: str | None = None,
        die_call: int = 0,
        slow_rank: int | None = None,
        slow_s: float = 0.0,
    ) -> None:
        super().__init__(hidden=32, depth=2, dropout=0.1)
        self.delay_s, self.validate_s, self.ballast_mb = delay_s, validate_s, ballast_mb
        self.hang_rank, self.hang_call, self.once = hang_rank, hang_call, once
        self.die_call = die_call
        self.slow_rank, self.slow_s = slow_rank, slow_s
        self.calls = 0

    def build_model(self, data: DataSpec) -> nn.Module:
        model = super().build_model(data)
        if self.ballast_mb:
            model.ballast = nn.Parameter(torch.zeros(self.ballast_mb * 2**18), requires_grad=False)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.calls += 1
        if self.calls == self.hang_call and dist.get_rank() == self.hang_rank:
            self.hang()
        if self.calls == self.die_call and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.delay_s + (self.slow_s if dist.get_rank() == self.slow_rank else 0.0))
        return super().loss(model, batch)

    def evaluate(self, model: nn.Module, batch: Batch) -> Sums:
        time.sleep(self.validate_s)
        return super().evaluate(model, batch)

    def hang(self) -> None:
        if self.once is not None:
            try:
                open(self.once, "x").close()
            except FileExistsError:
                return
        while True:
            time.sleep(1)
