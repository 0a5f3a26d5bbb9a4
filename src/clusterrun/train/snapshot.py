"""The training state as named tensors, for checkpoints:

    model/<name>  optim/<parameter>/<name>  rng/rank<r>/<generator>

All else is JSON in the manifest: position, gradient scaler. Hyper-parameters are the configuration's, and the learning
rate is a function of the step, so neither is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from clusterrun.checkpoint import dcp
from clusterrun.errors import CheckpointError
from clusterrun.train.rng import restore_rng, rng_state


def take(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """References (not copies) to all that is equal on all ranks and that a checkpoint must hold as tensors."""
    entries: dict[str, Any] = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, parameter in _optimized(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                entries[f"optim/{name}/{key}"] = value
            elif value is not None:
                raise CheckpointError(f"optimizer state '{key}' of {name} is a {type(value).__name__}, not a tensor")
    return entries


def take_random(rank: int, device: torch.device) -> dict[str, Any]:
    """This rank's random generators, as they are now."""
    return {f"rng/rank{rank}/{name}": value for name, value in rng_state(device).items()}


def restore(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Load model and optimizer from a checkpoint, bit for bit.

    Raises:
        CheckpointError: it is of another model.
    """
    layout = dcp.layout(directory)
    entries: dict[str, Any] = {f"model/{name}": value for name, value in model.state_dict().items()}
    unknown = sorted(key for key in layout if key.startswith("model/") and key not in entries)
    if unknown:
        raise CheckpointError(f"{directory}: does not fit this model, which has no {unknown[0].removeprefix('model/')}")
    for name, (shape, dtype) in layout.items():
        if name.startswith("optim/"):
            entries[name] = torch.empty(shape, dtype=dtype)
    dcp.read(entries, directory)
    model.load_state_dict({k.removeprefix("model/"): v for k, v in entries.items() if k.startswith("model/")})
    _restore_optimizer(model, optimizer, entries)


def restore_random(rank: int, directory: Path, device: torch.device) -> None:
    """Set this rank's random generators as they were."""
    prefix = f"rng/rank{rank}/"
    layout = dcp.layout(directory)
    states: dict[str, Any] = {
        key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in layout.items() if key.startswith(prefix)
    }
    dcp.read(states, directory)
    restore_rng({key.removeprefix(prefix): value for key, value in states.items()}, device)


def share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers (batch norm's statistics), as DDP does before the next forward pass anyway."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def _restore_optimizer(model: nn.Module, optimizer: Optimizer, entries: dict[str, Any]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for index, (name, _) in enumerate(_optimized(model, optimizer)):
        prefix = f"optim/{name}/"
        found = {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
        if found:
            state[index] = found
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _optimized(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters, in the optimizer's order, which its state is numbered by."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter
