"""Mixed precision: autocast, and a gradient scaler for fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from clusterrun.config.schema import Precision as Kind


class Precision:
    """fp32 does nothing; bf16 casts; fp16 casts and scales the loss, so that small gradients survive."""

    def __init__(self, kind: Kind, device: torch.device) -> None:
        self.device = device
        self.dtype = {Kind.fp32: None, Kind.bf16: torch.bfloat16, Kind.fp16: torch.float16}[kind]
        self._scaled = kind is Kind.fp16
        self.scaler = torch.amp.GradScaler(device.type, enabled=self._scaled)

    def backward(self, loss: Tensor) -> None:
        if self._scaled:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> None:
        """An optimizer step; with fp16 it is left out when a gradient is infinite."""
        if self._scaled:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)
