"""Samples as tensors on the training device. Everything is in memory; a batch is one indexing operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clusterrun.config.schema import DataConfig, DataKind
from clusterrun.errors import ConfigError
from clusterrun.train.arrays import Vectors, load_tokens, load_vectors
from clusterrun.train.builtin import CLASSES
from clusterrun.train.task import Batch, DataSpec


class Samples(Protocol):
    """One part (training or validation) of a data set."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> Batch:
        """Inputs and targets of the samples at ``indices`` (int64, on the same device)."""


@dataclass(frozen=True)
class Data:
    spec: DataSpec
    train: Samples
    valid: Samples


class VectorSamples:
    """float32 [samples, features] with int64 labels [samples]."""

    def __init__(self, vectors: Vectors, device: torch.device) -> None:
        self.inputs = torch.from_numpy(np.ascontiguousarray(vectors.inputs)).to(device)
        self.labels = torch.from_numpy(np.ascontiguousarray(vectors.labels)).to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> Batch:
        return self.inputs.index_select(0, indices), self.labels.index_select(0, indices)


class TokenSamples:
    """Windows of ``context`` bytes, side by side, each with the bytes that follow by one."""

    def __init__(self, text: NDArray[np.uint8], context: int, device: torch.device) -> None:
        self.windows = max(0, (len(text) - 1) // context)
        self.context = context
        self.text = torch.from_numpy(text.copy()).to(device)
        self.offsets = torch.arange(context + 1, device=device)

    def __len__(self) -> int:
        return self.windows

    def batch(self, indices: Tensor) -> Batch:
        windows = self.text[indices[:, None] * self.context + self.offsets].long()
        return windows[:, :-1], windows[:, 1:]


def load_data(data: DataConfig, seed: int, context: int, device: torch.device) -> Data:
    """Load what a task with this ``context`` trains on (0: vectors, else windows of so many bytes).

    Raises:
        ConfigError: the data is missing, malformed, of the wrong kind, or has no sample to train or validate on.
    """
    train: Samples
    valid: Samples
    if context:
        train, valid = (TokenSamples(text, context, device) for text in load_tokens(data, context, seed))
        spec = DataSpec(features=0, classes=256, context=context)
    else:
        parts = load_vectors(data, seed)
        train, valid = (VectorSamples(part, device) for part in parts)
        classes = CLASSES if data.kind is not DataKind.idx else int(parts[0].labels.max(initial=0)) + 1
        spec = DataSpec(features=parts[0].inputs.shape[1], classes=classes, context=0)
    if not len(train) or not len(valid):
        raise ConfigError(
            f"data: {len(train)} training and {len(valid)} validation samples, both must be at least 1"
            + (f" (a sample is {context} bytes)" if context else "")
        )
    return Data(spec, train, valid)
