"""Optimizers, and the learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import Optimizer as TorchOptimizer

from clusterrun.config.schema import Optimizer, Schedule, TrainConfig


def make_optimizer(model: nn.Module, train: TrainConfig) -> TorchOptimizer:
    """The optimizer ``train.optimizer`` names, over all parameters that need a gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if train.optimizer is Optimizer.sgd:
        return SGD(parameters, lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay)
    return AdamW(parameters, lr=train.lr, weight_decay=train.weight_decay)


def learning_rate(step: int, total_steps: int, train: TrainConfig) -> float:
    """Learning rate of the step after ``step`` steps are done: linear warm-up, then flat or down to 0."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule is Schedule.constant:
        return train.lr
    progress = (step - train.warmup_steps) / max(1, total_steps - train.warmup_steps)
    if train.schedule is Schedule.linear:
        return train.lr * (1 - progress)
    return train.lr * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: TorchOptimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
