"""The conductor's watch over a training step: what the agents say while it runs, and when there is no use in waiting.

A step that lost a part does not end by itself: peers wait in a collective for minutes. So the watch ends it as soon as
it is clear that it can't go on: an agent reported a failure, Slurm lost a node, or nothing moves any more.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from clusterrun import frames
from clusterrun.config.schema import RunConfig
from clusterrun.launch import hang, outcome
from clusterrun.launch.hang import Blame
from clusterrun.launch.lookout import BEAT, HANG
from clusterrun.launch.outcome import How, Outcome
from clusterrun.launch.stragglers import Straggler, Stragglers

# After an agent failed, how long the others get to say what they saw, seconds. They mostly fail with it.
_LAST_WORDS_S = 15.0
# After Slurm lost a node, the same; the dead node has nothing to say.
_LOST_S = 3.0
# After an agent reported a hang, how long the others get, seconds: they look at the same moment, give or take.
_GATHER_S = 8.0
_GATHER_SHARE = 0.3  # of the patience: medians differ a little from node to node
_GATHER_MOST_S = 45.0
_ASK_EVERY_S = 30.0
# What srun says when slurmctld told it of a dead node (Slurm 22.05: src/api/step_launch.c).
_NODE_FAILURE = re.compile(r"srun: error: Node failure on ")
# And of a task that ended badly, which an agent does without a word when it is killed. 75 is a stop.
_TASK_ENDED = re.compile(r"srun: error: \S+: tasks? [\d,-]+: (?!Exited with exit code 75\b)")


class StepWatch:
    """Watches one step on ``nodes`` whose tasks write to ``out`` and whose launcher writes to ``err``.

    ``nodes_left`` asks the scheduler which nodes the job still has.
    """

    def __init__(
        self,
        config: RunConfig,
        nodes: Sequence[str],
        out: Path,
        err: Path,
        *,
        nodes_left: Callable[[], Sequence[str]],
        tell: Callable[[Straggler, str], None],
    ) -> None:
        self._nodes, self._nodes_left, self._tell = list(nodes), nodes_left, tell
        self._outcomes = frames.FileReader(outcome.FRAME, out)
        self._hangs = frames.FileReader(HANG, out)
        self._beats = frames.FileReader(BEAT, out)
        self._errors = _Tail(err)
        recovery = config.recovery
        self._gather_s = min(_GATHER_S + _GATHER_SHARE * recovery.hang_floor_s, _GATHER_MOST_S)
        self._stragglers = Stragglers(recovery.straggler_factor, recovery.straggler_for_s)
        self._paced: dict[str, float] = {}
        self._failed_at = self._hung_at = self._lost_at = float("inf")
        self._asked = time.monotonic()
        self.lost: set[str] = set()  # nodes that Slurm says are gone
        self.blame: Blame | None = None  # why the step was ended, when it hung

    def look(self) -> str | None:
        """What has happened since the last call. A reason to end the step now, or None."""
        now = time.monotonic()
        self._pace()
        self._look_for_lost_nodes(now)
        said = self.outcomes()
        failed = any(o.how not in (How.done, How.stopped) for o in said.values())
        if failed:
            self._failed_at = min(self._failed_at, now)
        if self.lost and now - self._lost_at > _LOST_S:
            return f"lost {', '.join(sorted(self.lost))}"
        if now - self._failed_at > _LAST_WORDS_S:
            return "some nodes failed, and the others did not end"
        return self._look_for_hang(now, set(said))

    def outcomes(self) -> dict[str, Outcome]:
        """What the agents said at their end so far."""
        self._outcomes.poll()
        found = {}
        for node, value in self._outcomes.messages().items():
            if node in self._nodes:
                found[node] = Outcome.from_json(value)
        return found

    def _look_for_hang(self, now: float, ended: set[str]) -> str | None:
        self._hangs.poll()
        reports = hang.states({n: v for n, v in self._hangs.messages().items() if n in self._nodes})
        if not reports:
            return None
        self._hung_at = min(self._hung_at, now)
        if reports.keys() | ended < set(self._nodes) and now - self._hung_at < self._gather_s:
            return None
        self.blame = hang.blame([n for n in self._nodes if n not in ended], reports)
        return self.blame.message

    def _look_for_lost_nodes(self, now: float) -> None:
        for line in self._errors.new_lines():
            if _NODE_FAILURE.search(line):
                self._asked = -_ASK_EVERY_S  # its list may be compressed: ask rather than take it apart
            elif _TASK_ENDED.search(line):
                self._failed_at = min(self._failed_at, now)
        if now - self._asked > _ASK_EVERY_S:
            self._asked = now
            left = set(self._nodes_left())
            gone = {node for node in self._nodes if node not in left} if left else set()
            if gone - self.lost:
                self._lost_at = min(self._lost_at, now)
            self.lost |= gone

    def _pace(self) -> None:
        self._beats.poll()
        if self._beats.nodes != set(self._nodes):  # compared with all, or not at all
            return
        messages = {n: v for n, v in self._beats.messages().items() if n in self._nodes}
        times = {node: value["t"] for node, value in messages.items()}
        if times == self._paced:
            return
        self._paced = times
        own, where = {}, {}
        for node, value in messages.items():
            for rank, (_, own_ms, data_ms) in value["ranks"].items():
                own[int(rank)] = (own_ms / 1000, data_ms / 1000)
                where[int(rank)] = node
        for straggler in self._stragglers.update(max(times.values()), own):
            self._tell(straggler, where[straggler.rank])


class _Tail:
    """New whole lines of a file that is being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new_lines(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()
