"""A worker's signs of life: a few numbers in a small file on its node, which the node's agent looks at.

The file is mapped into memory, so a sign costs the step loop less than a microsecond and no system call, and it can be
read whatever state the worker is in. Torch-free.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

DIRECTORY = "CLUSTERRUN_PULSE_DIR"  # in the environment of the workers
# ticks, step, own_s, data_s, pid, rank, stage: everything in one page, written by one process.
_LAYOUT = struct.Struct("<qqddqqB")
_TICKS, _STEP, _OWN, _IDENTITY, _STAGE = 0, 8, 16, 32, 48
_TWO_FLOATS, _TWO_INTS = struct.Struct("<dd"), struct.Struct("<qq")


class Stage(IntEnum):
    """Where in its loop a worker is. In ``exchange`` it may be waiting for others, before that it works by itself."""

    starting = 0
    data = 1
    compute = 2
    exchange = 3
    validation = 4
    saving = 5
    ended = 6


@dataclass(frozen=True)
class Beat:
    """What a worker said last.

    Attributes:
        ticks: steps, validation batches and saves since the process began: that it grows is the sign of life.
        step: the last step begun, from 1.
        own_s: seconds of a recent step without waiting for other ranks; 0 when not known.
        data_s: seconds of it that went into fetching data.
    """

    ticks: int
    step: int
    own_s: float
    data_s: float
    pid: int
    rank: int
    stage: Stage


class Pulse:
    """The worker's side. Without a file it does the same into the void, so that callers need no ``if``."""

    def __init__(self, path: Path | None = None, rank: int = 0) -> None:
        self._buffer: mmap.mmap | bytearray = bytearray(_LAYOUT.size)
        if path is not None:
            # A new file for every process: what an earlier one of this rank left must not be taken for ours.
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            with temporary.open("w+b") as file:
                file.write(bytes(_LAYOUT.size))
                file.flush()
                self._buffer = mmap.mmap(file.fileno(), _LAYOUT.size)
            _TWO_INTS.pack_into(self._buffer, _IDENTITY, os.getpid(), rank)
            os.replace(temporary, path)
        self._ints = memoryview(self._buffer)[:_STAGE].cast("q")  # a third of the time of packing
        self._ticks = 0

    @classmethod
    def of_this_worker(cls) -> Pulse:
        """For a process that torchrun started under our agent; a pulse into the void elsewhere."""
        directory, rank = os.environ.get(DIRECTORY), os.environ.get("RANK", "0")
        if not directory:
            return cls()
        try:
            return cls(Path(directory) / rank, int(rank))
        except OSError:  # a full node-local disk must not end the training
            return cls()

    def begin(self, step: int, stage: Stage = Stage.data) -> None:
        """A step begins, with this stage."""
        self._ints[_STEP // 8] = step
        self._buffer[_STAGE] = stage

    def at(self, stage: Stage) -> None:
        self._buffer[_STAGE] = stage

    def tick(self) -> None:
        """Something was finished."""
        self._ticks += 1
        self._ints[_TICKS // 8] = self._ticks

    def pace(self, own_s: float, data_s: float) -> None:
        _TWO_FLOATS.pack_into(self._buffer, _OWN, own_s, data_s)


def read_all(directory: Path) -> dict[int, Beat]:
    """Rank -> what it said last, for the workers of this node. Files that are being made are passed over."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            if entry.name.startswith("."):
                continue
            with contextlib.suppress(OSError, struct.error, ValueError):
                ticks, step, own_s, data_s, pid, rank, stage = _LAYOUT.unpack(Path(entry.path).read_bytes())
                found[rank] = Beat(ticks, step, own_s, data_s, pid, rank, Stage(stage))
    return found
