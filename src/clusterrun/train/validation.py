"""Validation over all ranks: each takes its slice of the samples; the sums are added up, and every rank knows them."""

from __future__ import annotations

from signal import Signals

import torch
import torch.distributed as dist
from torch import nn

from clusterrun.checkpoint.retention import Score
from clusterrun.train.data import Samples
from clusterrun.train.mesh import Place
from clusterrun.train.polling import Poll
from clusterrun.train.precision import Precision
from clusterrun.train.rng import preserved_rng
from clusterrun.train.snapshot import share_buffers
from clusterrun.train.task import Task


def validate(
    task: Task, model: nn.Module, samples: Samples, batch: int, place: Place, poll: Poll, precision: Precision
) -> Score | Signals:
    """A collective. The stop signal when the ranks agreed on one meanwhile. Leaves no trace on training's state.

    Args:
        model: the bare model, not DDP's wrapper, whose forward pass is a collective in itself.
        batch: samples at once on each rank.
    """
    first, end = len(samples) * place.rank // place.world_size, len(samples) * (place.rank + 1) // place.world_size
    most = -(-len(samples) // place.world_size)  # of any rank: all ranks tick equally often
    sums = torch.zeros(3, dtype=torch.float64, device=place.device)
    share_buffers(model)
    training = model.training
    model.eval()
    poll.begin_phase()
    try:
        with torch.no_grad(), preserved_rng(place.device):
            for start in range(first, first + most, batch):
                if start < end:
                    indices = torch.arange(start, min(start + batch, end), device=place.device)
                    with precision.autocast():
                        found = task.evaluate(model, samples.batch(indices))
                    sums[0] += found.loss
                    sums[1] += found.metric
                    sums[2] += found.of
                if poll.tick() and (signal := poll.agree().signal) is not None:
                    return signal
    finally:
        model.train(training)
        poll.begin_phase()
    dist.all_reduce(sums)
    loss, value, of = sums.tolist()
    return Score(loss / of, value / of)
