"""When a save is due, with a clock of the test's own."""

from __future__ import annotations

import time

import pytest

from clusterrun.checkpoint.cadence import FIRST_AUTO_S, Cadence, FailureRate
from clusterrun.config.schema import CheckpointConfig
from clusterrun.ledger import Attempt, Ending

HOUR = 3600.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def cadence(clock: Clock, mtbf_h: float = 8.0, **settings: object) -> Cadence:
    config = CheckpointConfig(**{"every_steps": None, **settings})  # type: ignore[arg-type]
    return Cadence(config, FailureRate(mtbf_h * HOUR, "for the test"), clock)


def test_steps() -> None:
    by_steps = cadence(Clock(), every_steps=10)
    assert [step for step in range(1, 31) if by_steps.due_at(step)] == [10, 20, 30]
    assert not by_steps.due_by_time()
    assert not cadence(Clock()).due_at(10)


def test_minutes_count_from_the_last_save() -> None:
    clock = Clock()
    by_time = cadence(clock, every_minutes=10)
    clock.now += 599
    assert not by_time.due_by_time()
    by_time.began()  # by another rule
    clock.now += 599
    assert not by_time.due_by_time()
    clock.now += 1
    assert by_time.due_by_time()
    assert by_time.measured(5, 5) is None


def test_auto_measures_early_and_then_goes_by_young_and_daly() -> None:
    clock = Clock()
    auto = cadence(clock, auto=True)
    clock.now += FIRST_AUTO_S
    assert auto.due_by_time()
    auto.began()
    said = auto.measured(stall_s=2.0, seconds=9.0)
    assert auto.interval_s == pytest.approx((2 * 2.0 * 8 * HOUR) ** 0.5)  # 339 s
    assert said == (
        "checkpoint.auto: saving every 6 min, which costs 0.59% of the time: a save stops training for 2 s, "
        "a failure comes every 8.0 h (for the test)"
    )
    assert auto.measured(2.2, 9.0) is None  # as good as the same
    clock.now += 300
    assert not auto.due_by_time()
    clock.now += 60
    assert auto.due_by_time()
    for _ in range(4):
        said = auto.measured(20.0, 25.0) or said
    assert "every 18 min" in (said or "")


def test_auto_never_saves_more_often_than_it_can_write() -> None:
    auto = cadence(Clock(), mtbf_h=0.01, auto=True)
    auto.measured(stall_s=0.01, seconds=50.0)
    assert auto.interval_s == 50


def test_the_time_between_failures() -> None:
    config, now = CheckpointConfig(), time.time()
    assert FailureRate.of(config, [], 1024).mtbf_s == pytest.approx(7.9 * HOUR)
    assert FailureRate.of(config, [], 8).mtbf_s == pytest.approx(7.9 * 128 * HOUR)
    endings = [Ending.killed, Ending.node_lost, Ending.preempted, Ending.crashed, Ending.time_limit]
    story = [Attempt(n, now - (6 - n) * HOUR, "", "", ended=now, ending=e) for n, e in enumerate(endings)]
    story.append(Attempt(5, now, "", ""))  # this one, which is no failure
    observed = FailureRate.of(config, story, 1024)
    assert observed.mtbf_s == pytest.approx((6 + 7.9) / 4 * HOUR, rel=1e-3)
    assert "3 failures in 6.0 h" in observed.why
    assert FailureRate.of(CheckpointConfig(mtbf_h=5), story, 1024).mtbf_s == 5 * HOUR
