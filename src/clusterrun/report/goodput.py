"""Where the time of a run went, by cause, and its goodput: a pure function of the ledger and of rank 0's events.

    account = account_of(Ledger(run.ledger).attempts(), EventTail(run).new(), now=time.time())
    account.goodput_percent, account.by_cause()

Every second from the first submission to the end of the run (or to ``now``) belongs to one cause, so the causes add up
to ``total_s``. Left out is the time between a run's end and the submission that a person resumed it with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from clusterrun.ledger import Attempt

_PROGRESS = ("step", "eval", "checkpoint", "stopped", "done")


@dataclass(frozen=True)
class Seconds:
    """Seconds by cause.

    Attributes:
        queue: waiting for the scheduler, from submission or requeue to the start.
        preflight: from the start to the choice of nodes.
        rendezvous: from there to the first step: processes, imports, rendezvous, data, loading a checkpoint, warm-up;
            also torchrun's restarts inside an attempt.
        training: steps and validation that counted. All of a script's time, since nobody else knows its steps.
        checkpoint: the step loop stood still for a save.
        rework: steps that were lost, because a later attempt went on from before them.
        ending: from the last step to the end of the attempt: a fault was noticed, processes were ended.
    """

    queue: float = 0.0
    preflight: float = 0.0
    rendezvous: float = 0.0
    training: float = 0.0
    checkpoint: float = 0.0
    rework: float = 0.0
    ending: float = 0.0

    def by_cause(self) -> dict[str, float]:
        """Cause -> seconds, in the order of a run's life."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total_s(self) -> float:
        return sum(self.by_cause().values())

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(**{name: value + getattr(other, name) for name, value in self.by_cause().items()})


@dataclass(frozen=True)
class Account:
    """The time of a run. ``attempts`` maps an attempt's number to its own part."""

    attempts: Mapping[int, Seconds]

    @property
    def sum(self) -> Seconds:
        return sum(self.attempts.values(), Seconds())

    @property
    def total_s(self) -> float:
        return self.sum.total_s

    def by_cause(self) -> dict[str, float]:
        """Cause -> seconds over all attempts."""
        return self.sum.by_cause()

    def percent(self) -> dict[str, float]:
        """Cause -> percent of the total; all 0 when there is no time yet."""
        total = self.total_s
        return {cause: 100 * value / total if total else 0.0 for cause, value in self.by_cause().items()}

    @property
    def goodput_percent(self) -> float | None:
        """Training's share of all time, the queue included. None when there is no time yet."""
        return 100 * self.sum.training / self.total_s if self.total_s else None

    @property
    def goodput_of_held_percent(self) -> float | None:
        """Training's share of the time in which the run held nodes, so without the queue."""
        held = self.total_s - self.sum.queue
        return 100 * self.sum.training / held if held else None


def describe(account: Account) -> str:
    """One line for people: goodput, and what took at least 1 percent of the time."""
    goodput = account.goodput_percent
    if goodput is None:
        return "no time was spent yet"
    causes = account.by_cause()
    shown = [f"{cause} {causes[cause]:.0f} s" for cause, percent in account.percent().items() if percent >= 1]
    return f"goodput {goodput:.0f} % of {account.total_s:.0f} s: {', '.join(shown)}"


def account_of(attempts: Sequence[Attempt], events: Iterable[Mapping[str, Any]], now: float | None = None) -> Account:
    """Where the time went.

    Args:
        attempts: the ledger's, oldest first.
        events: rank 0's records, each with its ``attempt``, as ``report.events.EventTail`` gives them.
        now: unix time, when the run lives: its open last attempt, or its wait in the queue, lasts until then. Without
            it an attempt that has no end lasts until its last event.
    """
    by_attempt: dict[int, list[Mapping[str, Any]]] = {attempt.number: [] for attempt in attempts}
    for event in events:
        if not isinstance(event.get("t"), (int, float)):
            continue  # half a record that a crash left tells no time
        by_attempt.setdefault(event["attempt"], []).append(event)
    segments = {number: _segments(sorted(records, key=lambda e: e["t"])) for number, records in by_attempt.items()}
    found: dict[int, Seconds] = {}
    before: Attempt | None = None
    before_ended = 0.0
    for attempt, *rest in (attempts[i:] for i in range(len(attempts))):
        own = segments[attempt.number]
        kept = min((s.first_step for later in rest for s in segments[later.number]), default=None)
        end = _end_of(attempt, rest[0] if rest else None, own, now)
        queue = max(0.0, attempt.started - _queued_since(attempt, before, before_ended))
        if not rest and now is not None and not attempt.is_open and attempt.exit_code is None:
            queue += max(0.0, now - end)  # queued again, and not started yet
        found[attempt.number] = Seconds(queue=queue) + _held(attempt, own, end, kept)
        before, before_ended = attempt, end
    return Account(found)


@dataclass(frozen=True)
class _Segment:
    """One start of the workers inside an attempt: rank 0's events from ``start`` to before the next one."""

    events: tuple[Mapping[str, Any], ...]

    @property
    def first_step(self) -> int:
        return int(self.events[0].get("step") or 0)

    @property
    def ready(self) -> float | None:
        return next((float(e["t"]) for e in self.events if e["kind"] == "ready"), None)

    @property
    def last(self) -> float:
        """Unix time of its last progress, at least when it was ready; of its last event when it never was."""
        if self.ready is None:
            return float(self.events[-1]["t"])
        return max([self.ready, *(float(e["t"]) for e in self.events if e["kind"] in _PROGRESS)])

    def stalls(self) -> list[tuple[float, float]]:
        """Begin and length of each time the loop stood still for a save."""
        saves = [e for e in self.events if e["kind"] == "checkpoint"]
        found = [(float(e["t"]), float(e.get("stall_s", e.get("seconds")) or 0.0)) for e in saves]
        return [(max(t - length, self.ready or t), length) for t, length in found]

    def reached(self, step: int) -> float:
        """Unix time at which ``step`` was done, between logged steps in proportion; its save belongs to it."""
        assert self.ready is not None
        points = [(self.ready, self.first_step)]
        points += [(float(e["t"]), int(e["step"])) for e in self.events if e["kind"] in _PROGRESS and "step" in e]
        before = max((p for p in points if p[1] <= step), default=points[0])
        after = min((p for p in points if p[1] > step), default=None)
        if after is None or before[1] >= step:
            return min(before[0], after[0]) if after else self.last
        share = (step - before[1]) / (after[1] - before[1])
        return before[0] + share * (after[0] - before[0])


def _segments(events: Sequence[Mapping[str, Any]]) -> list[_Segment]:
    starts = [i for i, e in enumerate(events) if e["kind"] == "start"]
    return [_Segment(tuple(events[i:j])) for i, j in zip(starts, [*starts[1:], len(events)], strict=False)]


def _held(attempt: Attempt, segments: Sequence[_Segment], end: float, kept: int | None) -> Seconds:
    """The time from an attempt's start to its end. ``kept``: the lowest step that a later attempt went on from."""
    if attempt.chosen is None:
        return Seconds(preflight=max(0.0, end - attempt.started))
    total = Seconds(preflight=attempt.chosen - attempt.started)
    if not segments:  # a script, whose steps we do not know; or workers that never came so far
        spent = max(0.0, end - attempt.chosen)
        return total + Seconds(training=spent)
    at = attempt.chosen
    for index, segment in enumerate(segments):
        if segment.ready is None:
            total += Seconds(rendezvous=segment.last - at)
            at = segment.last
            continue
        total += Seconds(rendezvous=segment.ready - at)
        good_until = min([kept, *(s.first_step for s in segments[index + 1 :])], key=_no_limit_last)
        total += _trained(segment, good_until)
        at = segment.last
    return total + Seconds(ending=max(0.0, end - at))


def _no_limit_last(step: int | None) -> float:
    return float("inf") if step is None else step


def _trained(segment: _Segment, good_until: int | None) -> Seconds:
    assert segment.ready is not None
    begin, last = segment.ready, segment.last
    turn = last if good_until is None else min(last, max(begin, segment.reached(good_until)))
    stalls = segment.stalls()
    in_good = sum(length for start, length in stalls if start < turn)
    in_lost = sum(length for start, length in stalls if start >= turn)
    return Seconds(
        training=max(0.0, turn - begin - in_good),
        checkpoint=in_good + in_lost,
        rework=max(0.0, last - turn - in_lost),
    )


def _end_of(attempt: Attempt, later: Attempt | None, segments: Sequence[_Segment], now: float | None) -> float:
    """When an attempt ended. One that was killed lasted until it was queued again, or until its last sign of life."""
    if attempt.ended is not None:
        return attempt.ended
    alive = max([attempt.started, attempt.chosen or 0.0, *(float(s.events[-1]["t"]) for s in segments)])
    if later is None:
        return max(alive, now) if now is not None else alive
    same_job = later.job_id == attempt.job_id
    return max(alive, later.queued_since) if later.queued_since is not None and same_job else alive


def _queued_since(attempt: Attempt, before: Attempt | None, before_ended: float) -> float:
    """Unix time from which an attempt waited. A person's resume is a submission of its own."""
    if before is not None and before.exit_code is None and before.job_id == attempt.job_id:
        return before_ended
    return max(before_ended, attempt.started if attempt.queued_since is None else attempt.queued_since)
