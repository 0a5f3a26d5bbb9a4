"""Saving and resuming, with all ranks in agreement. What is published, and in what order, is ``store``'s business.

All traffic goes over a Gloo group of its own, never DDP's, with ``checkpoint.timeout_s`` as its time limit.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import clusterrun
from clusterrun.checkpoint import dcp
from clusterrun.checkpoint.manifest import FileRecord, Manifest, share
from clusterrun.checkpoint.store import CheckpointInfo, Store, step_name
from clusterrun.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """How a save ended. ``problem`` is None when it succeeded."""

    step: int
    path: str
    seconds: float
    bytes: int
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


@dataclass
class Checkpointer:
    """Saves and finds the checkpoints of a run. Every method is a collective: all ranks call it, in the same order.

    Attributes:
        keep: newest checkpoints retained.
        timeout_s: for the ranks to wait for each other, in seconds.
        device: where tensors of the default process group live.
        warn: takes what went wrong without ending anything; called on rank 0 only.
    """

    store: Store
    attempt: int
    config_hash: str
    keep: int
    timeout_s: float
    device: torch.device
    warn: Callable[[str], None]
    _group: dist.ProcessGroup = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = self._new_group()
        if self.rank == 0:
            self.store.remove_stale_temporaries(self.attempt)

    def save(self, step: int, tensors: Mapping[str, Any], trainer: Mapping[str, Any]) -> Saved:
        """Write and publish a checkpoint. A failure is warned of and reported, not raised: training goes on.

        Args:
            tensors: key -> tensor, equal on all ranks unless the key names the rank.
            trainer: everything else, as JSON.
        """
        started = time.monotonic()
        temporary, published, problem, broken = None, None, None, False
        try:
            temporary, nonce = self._agree(lambda: self.store.new_temporary(step, self.attempt))
            records = self._gather(dcp.write(tensors, temporary, self._group))
            files = tuple(record for of_rank in records for record in of_rank)
            manifest = self._manifest(step, nonce, trainer, files)
            if self.rank == 0:
                published = self.store.publish(temporary, manifest, self.warn)
        except (CheckpointException, CheckpointError, OSError) as error:
            problem = _reason(error)  # every rank knows, and the group is intact
        except RuntimeError as error:
            problem, broken = f"the ranks could not agree: {_first_line(error)}", True
        published_bytes, any_broken = self._outcome(published.bytes or 0 if published else -1, broken)
        if any_broken:
            self._group = self._new_group()
        ok = published_bytes >= 0
        path = str(self.store.directory / step_name(step))
        if ok:
            problem = None
        elif problem is None:
            problem = "rank 0 could not publish it"
        if self.rank == 0:
            if ok:
                self.store.retain(self.keep, self.warn)
            else:
                if temporary is not None:
                    self.store.discard(temporary)
                self.warn(f"the checkpoint of step {step} is not saved: {problem}; training goes on")
        return Saved(step, path, time.monotonic() - started, max(0, published_bytes), problem)

    def find(self) -> CheckpointInfo | None:
        """The newest checkpoint whose files are all undamaged; None when the run has none yet.

        Damaged ones are set aside and the one before is taken.

        Raises:
            CheckpointError: there are or were checkpoints, but none is valid.
        """
        while True:
            info = self._agree(self._newest)
            if info is None or info.manifest is None:
                return None
            mine = self.store.verify(info, share(info.manifest.files, self.rank, self.world_size))
            problems = [problem for of_rank in self._gather(mine) for problem in of_rank]
            if not problems:
                return info
            self._agree(lambda info=info, problem=problems[0]: self._set_aside(info, problem))  # type: ignore[misc]

    def _newest(self) -> CheckpointInfo | None:
        for info in self.store.list():
            if info.manifest is not None:
                return info
            self._set_aside(info, info.problem or "no manifest")
        if self.store.has_remains():
            raise CheckpointError(
                f"{self.store.directory}: holds checkpoints, but none is valid, so there is nothing to resume from. "
                "Restore one, or remove all (also .bad-*) to begin again from step 0"
            )
        return None

    def _set_aside(self, info: CheckpointInfo, problem: str) -> None:
        aside = self.store.set_aside(info)
        self.warn(f"{problem}; {info.path.name} is set aside as {aside.name}")

    def _manifest(self, step: int, nonce: str, trainer: Mapping[str, Any], files: tuple[FileRecord, ...]) -> Manifest:
        versions = {"clusterrun": clusterrun.__version__, "torch": torch.__version__, "numpy": numpy.__version__}
        return Manifest(
            step=step,
            world_size=self.world_size,
            attempt=self.attempt,
            nonce=nonce,
            config_hash=self.config_hash,
            created=time.time(),
            versions=versions,
            trainer=trainer,
            files=files,
        )

    def _new_group(self) -> dist.ProcessGroup:
        limit = datetime.timedelta(seconds=self.timeout_s)
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=limit))

    def _agree(self, action: Callable[[], T]) -> T:
        """Do something on rank 0 and tell all the result, or raise its error on all as CheckpointError."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = action()
            except (CheckpointError, OSError) as error:
                answer[1] = _reason(error)
        dist.broadcast_object_list(answer, src=0, group=self._group)
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        result: T = answer[0]
        return result

    def _gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _outcome(self, published_bytes: int, broken: bool) -> tuple[int, bool]:
        """What rank 0 published (bytes, -1: nothing) and whether any rank lost the checkpoint group.

        Goes over the default group, since the other may be what failed. Only rank 0 knows what was published.
        """
        mine = [float(published_bytes) if self.rank == 0 else 0.0, float(broken)]
        both = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(both)
        published, anyone = both.tolist()
        return int(published), anyone > 0


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, failure = next(iter(error.failures.items()))
        return f"rank {rank}: {_reason(failure[0])}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
