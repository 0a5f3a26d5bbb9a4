"""Saving and resuming, with all ranks in agreement. What is published, and in what order, is ``store``'s business.

All traffic goes over a Gloo group of its own, never DDP's, with ``checkpoint.timeout_s`` as its time limit.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import clusterrun
from clusterrun.checkpoint import dcp
from clusterrun.checkpoint.manifest import FileRecord, Manifest, share
from clusterrun.checkpoint.retention import Keep
from clusterrun.checkpoint.staging import HostCopies, fingerprint, my_share
from clusterrun.checkpoint.store import CheckpointInfo, Store, step_name
from clusterrun.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """How a save ended. ``problem`` is None when it succeeded.

    Attributes:
        seconds: from its beginning until it was published or given up.
        stall_s: how long training had to wait for it: all of ``seconds`` when it was not in the background.
    """

    step: int
    path: str
    seconds: float
    stall_s: float
    bytes: int
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


@dataclass
class _Writing:
    """A save that is being written: what goes in, and what this rank knows when its part has ended."""

    step: int
    entries: Mapping[str, Any]
    fingerprint: str
    trainer: Mapping[str, Any]
    group: dist.ProcessGroup
    began: float
    stall_s: float = 0.0
    thread: threading.Thread | None = None
    given_up: bool = False  # nobody waits for it any more: it must publish nothing
    temporary: Path | None = None
    published_bytes: int = -1  # on rank 0, once it is published
    problem: str | None = None
    broken: bool = False  # the group lost a rank
    crash: BaseException | None = None
    warnings: list[str] = field(default_factory=list)
    ended: float | None = None


@dataclass
class Checkpointer:
    """Saves and finds the checkpoints of a run. ``save``, ``finish`` and ``find`` are collectives.

    Attributes:
        keep: what is retained.
        timeout_s: for the ranks to wait for each other, in seconds.
        device: where tensors of the default process group live.
        warn: takes what went wrong without ending anything; called on rank 0 only, by the thread that calls us.
    """

    store: Store
    attempt: int
    config_hash: str
    keep: Keep
    timeout_s: float
    device: torch.device
    warn: Callable[[str], None]
    _group: dist.ProcessGroup = field(init=False)
    _copies: HostCopies = field(init=False, default_factory=HostCopies)
    _writing: _Writing | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = self._new_group()
        if self.rank == 0:
            self.store.remove_stale_temporaries(self.attempt)

    def save(
        self, step: int, shared: Mapping[str, Any], trainer: Mapping[str, Any], own: Mapping[str, Any] | None = None
    ) -> Saved:
        """Write and publish a checkpoint. A failure is warned of and reported, not raised: training goes on.

        Args:
            shared: key -> tensor, with the same keys and values on all ranks, each of which writes a part.
            trainer: everything else, as JSON.
            own: key -> tensor of this rank alone; no other rank has such a key.
        """
        self._writing = self._prepare(step, shared, trainer, own, time.monotonic())
        self._write(self._writing)
        return self.finish()

    def start(
        self, step: int, shared: Mapping[str, Any], trainer: Mapping[str, Any], own: Mapping[str, Any] | None = None
    ) -> float:
        """The same in the background: returns when the state is copied, with the seconds that took.

        No collective. ``finish`` must be called, by all ranks, before the next ``save`` or ``start``.
        """
        began = time.monotonic()
        writing = self._prepare(step, shared, trainer, own, began)
        writing.entries = self._copies.of(writing.entries)
        writing.thread = threading.Thread(target=self._in_background, args=[writing], name="checkpoint", daemon=True)
        writing.thread.start()
        self._writing = writing
        writing.stall_s = time.monotonic() - began
        return writing.stall_s

    @property
    def in_flight(self) -> int | None:
        """The step that is being written in the background, until ``finish``; the same on all ranks."""
        return None if self._writing is None else self._writing.step

    @property
    def has_ended(self) -> bool:
        """Whether this rank's part of the save in the background is done: then ``finish`` need not wait for it."""
        return self._writing is not None and self._writing.ended is not None

    def finish(self) -> Saved:
        """Wait for the save that was started, and agree with the other ranks on how it ended."""
        writing = self._writing
        if writing is None:
            raise AssertionError("no save was started")
        if writing.thread is not None:
            # Its collectives have time limits; a rank whose disk never answers must not stop the others.
            began = time.monotonic()
            writing.thread.join(3 * self.timeout_s)
            writing.stall_s += time.monotonic() - began
            if writing.thread.is_alive():
                writing.given_up = writing.broken = True
                writing.problem = f"rank {self.rank} did not come to an end of writing in {3 * self.timeout_s:.0f} s"
                self._copies = HostCopies()  # the old ones may still be read
        if writing.crash is not None:
            raise writing.crash
        self._writing = None
        published_bytes, any_broken = self._outcome(writing.published_bytes, writing.broken)
        if any_broken:
            self._group = self._new_group()
        ok, problem = published_bytes >= 0, writing.problem
        if ok:
            problem = None
        elif problem is None:
            problem = "rank 0 could not publish it"
        if self.rank == 0:
            for warning in writing.warnings:
                self.warn(warning)
            if not ok:
                if writing.temporary is not None and not writing.given_up:
                    self.store.discard(writing.temporary)
                self.warn(f"the checkpoint of step {writing.step} is not saved: {problem}; training goes on")
        path = str(self.store.directory / step_name(writing.step))
        seconds = (writing.ended or time.monotonic()) - writing.began
        stall_s = seconds if writing.thread is None else writing.stall_s
        return Saved(writing.step, path, seconds, stall_s, max(0, published_bytes), problem)

    def _prepare(
        self,
        step: int,
        shared: Mapping[str, Any],
        trainer: Mapping[str, Any],
        own: Mapping[str, Any] | None,
        began: float,
    ) -> _Writing:
        if self._writing is not None:
            raise AssertionError(f"the save of step {self._writing.step} is not finished")
        entries = {**my_share(shared, self.rank, self.world_size), **(own or {})}
        return _Writing(step, entries, fingerprint(shared), trainer, self._group, began)

    def _in_background(self, writing: _Writing) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins with GPU 0, and would take memory there
        self._write(writing)

    def _write(self, writing: _Writing) -> None:
        """Write this rank's part; rank 0 publishes. Notes how it ended and raises nothing."""
        try:
            writing.temporary, nonce = self._agree(
                lambda: self.store.new_temporary(writing.step, self.attempt), writing.group
            )
            written = dcp.write(writing.entries, writing.temporary, writing.group)
            answers = self._gather((writing.fingerprint, written), writing.group)
            if len({of_rank for of_rank, _ in answers}) > 1:
                raise CheckpointError("the ranks' states have different keys or shapes")
            files = tuple(record for _, records in answers for record in records)
            manifest = self._manifest(writing.step, nonce, writing.trainer, files)
            if self.rank == 0 and not writing.given_up:
                published = self.store.publish(writing.temporary, manifest, writing.warnings.append)
                writing.published_bytes = published.bytes or 0
                self.store.retain(self.keep, writing.warnings.append)
        except (CheckpointException, CheckpointError, OSError) as error:
            writing.problem = _reason(error)  # every rank knows, and the group is intact
        except RuntimeError as error:
            writing.problem, writing.broken = f"the ranks could not agree: {_first_line(error)}", True
        except BaseException as error:
            writing.crash = error
        finally:
            writing.ended = time.monotonic()

    def find(self) -> CheckpointInfo | None:
        """The newest checkpoint whose files are all undamaged; None when the run has none yet.

        Damaged ones are set aside and the one before is taken.

        Raises:
            CheckpointError: there are or were checkpoints, but none is valid.
        """
        while True:
            info = self._agree(self._newest, self._group)
            if info is None or info.manifest is None:
                return None
            mine = self.store.verify(info, share(info.manifest.files, self.rank, self.world_size))
            problems = [problem for of_rank in self._gather(mine, self._group) for problem in of_rank]
            if not problems:
                return info
            self._agree(partial(self._set_aside, info, problems[0]), self._group)

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

    def _agree(self, action: Callable[[], T], group: dist.ProcessGroup) -> T:
        """Do something on rank 0 and tell all the result, or raise its error on all as CheckpointError."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = action()
            except (CheckpointError, OSError) as error:
                answer[1] = _reason(error)
        dist.broadcast_object_list(answer, src=0, group=group)
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        result: T = answer[0]
        return result

    def _gather(self, value: T, group: dist.ProcessGroup) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=group)
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
