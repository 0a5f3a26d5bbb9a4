"""Times collectives in a process group. Imports torch.

Each iteration is timed by itself, back to back with the others, on the CPU's clock (Gloo) or between events in the
stream (NCCL). A rank's time is the median; the group's time is its slowest rank's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from clusterrun.measure.collectives import ELEMENT
from clusterrun.measure.results import Row

_LEAST = 3  # iterations, however long they take


@dataclass(frozen=True)
class Settings:
    """``seconds``: about how long one size may take; fewer iterations are made when one takes long."""

    warmup: int
    iterations: int
    seconds: float
    check: bool


def measure(
    collective: str,
    size: int,
    phase: str,
    ranks: tuple[int, ...],
    group: dist.ProcessGroup,
    device: torch.device,
    settings: Settings,
) -> Row:
    """One row. A collective over ``group``; every rank of it gets the same row."""
    n, me = len(ranks), ranks.index(dist.get_rank())
    chunk = max(1, -(-size // (ELEMENT * n)))  # elements per rank where a buffer is cut into n
    count = max(1, -(-size // ELEMENT)) if collective in ("all_reduce", "broadcast") else chunk * n
    operation = _Operation(collective, n, me, count, ranks[0], group, device)
    wrong = operation.wrong() if settings.check else None
    operation.clear()
    operation.run()  # connections are made by the first one
    once = _slowest([_time_each(operation.run, 1, device)[0]], group, device)[0]
    affordable = int(settings.seconds / max(once, 1e-9))
    _time_each(operation.run, min(settings.warmup, affordable), device)
    iterations = max(_LEAST, min(settings.iterations, affordable))
    times = _time_each(operation.run, iterations, device)
    values = [statistics.median(times), min(times), float(wrong or 0)]
    seconds, best, worst = _slowest(values, group, device)
    return Row(
        phase, ranks, collective, count * ELEMENT, seconds, best, iterations, int(worst) if settings.check else None
    )


class _Operation:
    """A collective with its buffers."""

    def __init__(
        self, collective: str, n: int, me: int, count: int, root: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.n, self.me, self.count = n, me, count
        self.collective, self.device = collective, device
        whole = torch.zeros(count, device=device)
        part = torch.zeros(count // n or 1, device=device)
        self.sent = part if collective == "all_gather" else whole
        self.received = {
            "all_gather": whole,
            "reduce_scatter": part,
            "all_to_all": torch.zeros(count, device=device) if collective == "all_to_all" else whole,
        }.get(collective, whole)
        sent, received = self.sent, self.received
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(sent, group=group),
            "all_gather": lambda: _all_gather()(received, sent, group=group),
            "reduce_scatter": lambda: _reduce_scatter()(received, sent, group=group),
            "broadcast": lambda: dist.broadcast(sent, src=root, group=group),
            "all_to_all": lambda: dist.all_to_all_single(received, sent, group=group),
        }
        self.run = calls[collective]

    def clear(self) -> None:
        """Zeros stay zeros, however often they are added up."""
        self.sent.zero_()

    def wrong(self) -> int:
        """Run it once on values of which the result is known exactly; the number of elements that are not as they
        should be."""
        n, count, me, ring = self.n, self.count, self.me, torch.arange(self.count, device=self.device) % 7
        if self.collective in ("all_reduce", "broadcast"):
            self.sent.copy_(ring + me)
            expected = ring * n + n * (n - 1) // 2 if self.collective == "all_reduce" else ring
        elif self.collective == "all_gather":
            self.sent.copy_(ring[: count // n] + me)
            expected = torch.cat([ring[: count // n] + rank for rank in range(n)])
        elif self.collective == "reduce_scatter":
            self.sent.copy_(ring + me)
            mine = ring[me * (count // n) : (me + 1) * (count // n)]
            expected = mine * n + n * (n - 1) // 2
        else:
            chunks = ring[: count // n]
            self.sent.copy_(torch.cat([chunks + me * 8 + to for to in range(n)]))
            expected = torch.cat([chunks + source * 8 + me for source in range(n)])
        self.run()
        return int((self.received != expected.to(self.received.dtype)).sum().item())


def _time_each(run: Callable[[], object], iterations: int, device: torch.device) -> list[float]:
    """Seconds of each iteration."""
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize(device)
        return [marks[i].elapsed_time(marks[i + 1]) / 1000 for i in range(iterations)]
    marks_s = [time.perf_counter()]
    for _ in range(iterations):
        run()
        marks_s.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(marks_s)]


def _slowest(values: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The largest of each value over the ranks of the group."""
    shared: Tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in shared.tolist()]


def _all_gather() -> Callable[..., object]:
    """The name since torch 2.13, else the one before, which now warns."""
    found: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return found


def _reduce_scatter() -> Callable[..., object]:
    found: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return found
