"""The agent's watch over the workers of its node: are they getting on, and how fast.

It looks at their pulses (``clusterrun.pulse``), which works whatever state a worker is in, and tells the conductor over
standard output (``clusterrun.frames``): a ``beat`` now and then, and a ``hang`` when no step ended for too long. Before
that it makes every worker of the node write its Python stacks to its log.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterrun import frames, pulse
from clusterrun.config.schema import RunConfig
from clusterrun.pulse import Beat, Stage

BEAT, HANG = "beat", "hang"
_LOOK_S = 0.25
_DUMP_S = 1.0  # for the workers to write their stacks
_GONE = ("", "Z", "X")
_PACES = 51  # so many recent steps make the median
# At most so many beats per second from all nodes together: they end up in a log (300 bytes each, 100 MB a day).
_BEATS_PER_S = 4.0


@dataclass(frozen=True)
class Limits:
    """When a worker counts as hung, in seconds; see RecoveryConfig."""

    factor: float
    floor_s: float
    start_s: float
    warmup_steps: int
    save_s: float

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        recovery = config.recovery
        return cls(
            factor=recovery.hang_factor,
            floor_s=recovery.hang_floor_s,
            start_s=recovery.hang_start_s,
            warmup_steps=recovery.hang_warmup_steps,
            save_s=config.checkpoint.timeout_s,
        )

    def patience_s(self, beat: Beat, median_s: float | None) -> float:
        """How long this worker may take for what it is doing."""
        if self.factor == 0 or beat.stage is Stage.ended:
            return float("inf")
        usual = max(self.floor_s, self.factor * (median_s or 0.0))
        if beat.stage is Stage.starting or beat.ticks < self.warmup_steps or median_s is None:
            return max(self.start_s, usual)
        return usual + (self.save_s if beat.stage is Stage.saving else 0.0)


@dataclass(frozen=True)
class RankState:
    """One worker at the moment of a report. ``state`` is the kernel's letter: R, S, D, T (stopped), Z; '' when gone."""

    rank: int
    pid: int
    ticks: int
    step: int
    stage: str
    state: str
    quiet_s: float


class Watched:
    """What the agent knows of one worker process."""

    def __init__(self, beat: Beat) -> None:
        self.beat = beat
        self.quiet_s = 0.0
        self.reported = False
        self._paces: deque[float] = deque(maxlen=_PACES)

    def look(self, beat: Beat, passed_s: float) -> None:
        """Take in a beat, ``passed_s`` seconds after the one before."""
        self.quiet_s += passed_s
        if beat.ticks > self.beat.ticks:
            self._paces.append(self.quiet_s / (beat.ticks - self.beat.ticks))
            self.quiet_s = 0.0
        elif beat.stage is not self.beat.stage and Stage.saving in (beat.stage, self.beat.stage):
            self.quiet_s = 0.0  # a save begins or ended: its time is counted by itself
        self.beat = beat

    @property
    def median_s(self) -> float | None:
        return statistics.median(self._paces) if self._paces else None


class Lookout:
    """Watches until the process ends. ``say`` writes to where the conductor reads."""

    def __init__(
        self, directory: Path, node: str, nodes: int, config: RunConfig, say: Callable[[str], None] | None = None
    ) -> None:
        self._directory, self._node = directory, node
        self._limits = Limits.of(config)
        self._beat_every_s = max(config.recovery.heartbeat_s, nodes / _BEATS_PER_S)
        self._say = say or _say
        self._watched: dict[int, Watched] = {}
        self._beat_due = 0.0
        self._said: dict[int, int] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, name="lookout", daemon=True).start()

    def step(self) -> int | None:
        """The furthest step that a worker of this node has begun; None before the first."""
        return max((beat.step for beat in pulse.read_all(self._directory).values()), default=0) or None

    def look(self, passed_s: float) -> None:
        """One look, ``passed_s`` seconds after the one before."""
        for rank, beat in pulse.read_all(self._directory).items():
            known = self._watched.get(rank)
            if known is None or known.beat.pid != beat.pid:  # new, or started again by torchrun
                self._watched[rank] = Watched(beat)
            else:
                known.look(beat, passed_s)
        for rank, watched in list(self._watched.items()):
            if process_state(watched.beat.pid) in _GONE:  # torchrun's business: it ends its peers, or starts it again
                del self._watched[rank]
        hung = [w for w in self._watched.values() if w.quiet_s > self._limits.patience_s(w.beat, w.median_s)]
        if hung and not any(w.reported for w in self._watched.values()):
            for watched in self._watched.values():
                watched.reported = True
            self._report_hang()
        self._beat_due -= passed_s
        if self._beat_due <= 0 and self._ticks() != self._said:
            self._beat_due, self._said = self._beat_every_s, self._ticks()
            self._say(frames.encode(BEAT, self._node, self._beats()))

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            # A late look (this process was stopped, the machine was suspended) is no reproach to the workers.
            self.look(min(now - last, 2 * _LOOK_S))
            last = now

    def _ticks(self) -> dict[int, int]:
        return {rank: watched.beat.ticks for rank, watched in self._watched.items()}

    def _beats(self) -> dict[str, Any]:
        """Per rank: step, milliseconds of its own in a step, of which for data."""
        ranks = {
            str(rank): [w.beat.step, round(1000 * w.beat.own_s, 3), round(1000 * w.beat.data_s, 3)]
            for rank, w in self._watched.items()
        }
        return {"t": round(time.time(), 3), "ranks": ranks}

    def _report_hang(self) -> None:
        states = {rank: process_state(w.beat.pid) for rank, w in self._watched.items()}
        for watched in self._watched.values():
            dump_stacks(watched.beat.pid)
        time.sleep(_DUMP_S)
        ranks = [
            RankState(rank, w.beat.pid, w.beat.ticks, w.beat.step, w.beat.stage.name, states[rank], w.quiet_s)
            for rank, w in sorted(self._watched.items())
        ]
        self._say(frames.encode(HANG, self._node, {"t": time.time(), "ranks": [asdict(rank) for rank in ranks]}))


def dump_stacks(pid: int) -> bool:
    """Have a worker write the Python stacks of its threads to its log (faulthandler). False when it has no handler.

    A handler of faulthandler's is in C and runs whatever the interpreter is doing; only a stopped process must wait.
    """
    if not catches(pid, signal.SIGUSR1):
        return False
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return False
    return True


def process_state(pid: int) -> str:
    """The kernel's letter for a process, '' when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has installed a handler for a signal (its bit in SigCgt of /proc/<pid>/status)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught >> (number - 1) & 1)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
