"""What a training task is. Built-in ones are in ``tasks``; a user's own is ``train.task="package.module:Class"``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from clusterrun.errors import ConfigError
from clusterrun.train.builtin import check_task_args, is_builtin

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class DataSpec:
    """What the samples look like. ``classes`` is 256 for bytes; ``context`` is 0 for vectors."""

    features: int
    classes: int
    context: int


class Sums(NamedTuple):
    """Scalars summed over a batch of validation samples: their loss and metric are these divided by ``of``."""

    loss: Tensor
    metric: Tensor
    of: int


class Task(Protocol):
    """A batch is (inputs, targets): vectors float32 [batch, features] and int64 [batch]; or with ``context`` > 0
    bytes as int64 [batch, context] and the bytes that follow each, of the same shape."""

    metric: str  # name of what evaluate() measures, e.g. accuracy
    context: int  # bytes per sample; 0 when the task takes vectors

    def build_model(self, data: DataSpec) -> nn.Module:
        """A new model on the default device. The random state is the same on every rank."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch, a scalar. ``model`` is wrapped in DDP: call it once."""

    def evaluate(self, model: nn.Module, batch: Batch) -> Sums:
        """Sums over a validation batch. Called in eval mode, without gradients."""


def load_task(name: str, args: Mapping[str, Any]) -> Task:
    """Make the task ``train.task`` names. Raises ConfigError when there is none such; the task's own errors pass."""
    checked = check_task_args(name, args)
    module_name, _, class_name = name.partition(":")
    if is_builtin(name):
        module_name, class_name = "clusterrun.train.tasks", name.capitalize()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the task's module is there; something it needs is not
        raise ConfigError(f"train.task={name}: no module named '{error.name}' on the workers' Python path") from None
    found = getattr(module, class_name, None)
    missing = [part for part in ("build_model", "loss", "evaluate") if not callable(getattr(found, part, None))]
    if found is None or missing:
        what = f"has no method {missing[0]}" if found is not None else f"is not in {module_name}"
        raise ConfigError(f"train.task={name}: {class_name} {what}")
    task = found(**checked)
    for attribute, default in (("metric", "metric"), ("context", 0)):
        if not hasattr(task, attribute):
            setattr(task, attribute, default)
    assert torch.is_grad_enabled()
    result: Task = task
    return result
