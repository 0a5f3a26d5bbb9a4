"""Where the time of a run went, against cases worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.ledger import Attempt, Ending
from clusterrun.report.goodput import Account, Seconds, account_of, describe

Event = dict[str, Any]


def attempt(number: int, started: float, ended: float | None, **fields: Any) -> Attempt:
    given_ = {"reason": "r", "job_id": "7", "chosen": started + 10, "ending": Ending.crashed, **fields}
    return Attempt(number=number, started=started, ended=ended, **given_)


def events(number: int, *records: tuple[Any, ...]) -> list[Event]:
    """(t, kind, step[, seconds of a save])."""
    names = ("t", "kind", "step", "seconds")
    return [{**dict(zip(names, r, strict=False)), "attempt": number, "rank": 0} for r in records]


def causes(account: Account) -> dict[str, float]:
    return {cause: value for cause, value in account.by_cause().items() if value}


def test_one_attempt_without_trouble() -> None:
    """Submitted at 100, started at 130, nodes chosen at 140, first step at 160, a save of 4 s, done at 260, end 262."""
    story = [attempt(1, 130, 262, queued_since=100.0, ending=Ending.done, exit_code=0)]
    happened = events(
        1, (155, "start", 0), (160, "ready", 0), (204, "checkpoint", 50, 4.0), (258, "step", 100), (260, "done", 100)
    )
    account = account_of(story, happened)
    assert causes(account) == {
        "queue": 30, "preflight": 10, "rendezvous": 20, "checkpoint": 4, "training": 96, "ending": 2
    }  # fmt: skip
    assert account.total_s == 162
    assert account.goodput_percent == pytest.approx(100 * 96 / 162)
    assert account.goodput_of_held_percent == pytest.approx(100 * 96 / 132)
    assert describe(account) == (
        "goodput 59 % of 162 s: queue 30 s, preflight 10 s, rendezvous 20 s, training 96 s, checkpoint 4 s, ending 2 s"
    )
    assert describe(account_of([], [])) == "no time was spent yet"


def test_steps_after_the_last_save_are_rework() -> None:
    """Saved at step 50 (t=204), went on to step 90 (t=244), crashed, noticed at 250; goes on from step 50 at once."""
    story = [attempt(1, 130, 250), attempt(2, 250, 340, ending=Ending.done, exit_code=0)]
    happened = events(
        1, (155, "start", 0), (160, "ready", 0), (200, "step", 50), (204, "checkpoint", 50, 4.0), (244, "step", 90)
    ) + events(2, (270, "start", 50), (280, "ready", 50), (330, "done", 100))
    first, second = account_of(story, happened).attempts.values()
    assert first == Seconds(preflight=10, rendezvous=20, training=40, checkpoint=4, rework=40, ending=6)
    assert second == Seconds(preflight=10, rendezvous=20, training=50, ending=10)


def test_a_step_between_two_logged_ones_is_found_in_proportion() -> None:
    """Logged at steps 0 (t=20) and 100 (t=120); the later attempt went on from 30, so 70 of 100 s are lost."""
    story = [attempt(1, 0, 120), attempt(2, 120, 130, chosen=None)]
    happened = events(1, (15, "start", 0), (20, "ready", 0), (120, "step", 100)) + events(2, (125, "start", 30))
    first = account_of(story, happened).attempts[1]
    assert (first.training, first.rework) == pytest.approx((30, 70))


def test_a_damaged_checkpoint_loses_an_earlier_attempts_steps_too() -> None:
    """Attempt 2 went on from 50, attempt 3 again from 50: all of attempt 2's steps are lost; 60 saved in vain."""
    story = [attempt(1, 0, 70), attempt(2, 70, 140), attempt(3, 140, 200)]
    happened = (
        events(1, (15, "start", 0), (20, "ready", 0), (70, "checkpoint", 50, 0.0))
        + events(2, (85, "start", 50), (90, "ready", 50), (140, "checkpoint", 60, 10.0))
        + events(3, (155, "start", 50), (160, "ready", 50), (200, "step", 90))
    )
    account = account_of(story, happened)
    assert account.attempts[1].rework == 0
    assert account.attempts[2] == Seconds(preflight=10, rendezvous=10, rework=40, checkpoint=10)
    assert account.attempts[3].training == 40


def test_torchruns_own_restart_inside_an_attempt() -> None:
    """Ready at 20, step 40 at 60, a worker died, again ready at 80 from step 20 (reached at 40), done at 120."""
    story = [attempt(1, 0, 120, ending=Ending.done, exit_code=0)]
    happened = events(
        1,
        (15, "start", 0), (20, "ready", 0), (40, "checkpoint", 20, 0.0), (60, "step", 40),
        (75, "start", 20), (80, "ready", 20), (120, "done", 60),
    )  # fmt: skip
    assert causes(account_of(story, happened)) == {
        "preflight": 10, "rendezvous": 10 + 20, "training": 20 + 40, "rework": 20
    }  # fmt: skip


def test_requeued_waits_and_is_not_a_new_submission() -> None:
    story = [
        attempt(1, 10, 50, queued_since=0.0, ending=Ending.preempted),
        attempt(2, 80, 100, queued_since=51.0, ending=Ending.done, exit_code=0),
    ]
    found = account_of(story, [])
    assert (found.attempts[1].queue, found.attempts[2].queue) == (10, 30)


def test_the_time_before_a_person_resumes_is_nobodys() -> None:
    story = [
        attempt(1, 0, 50, exit_code=93),
        attempt(2, 1000, 1020, job_id="8", queued_since=990.0, ending=Ending.done, exit_code=0),
    ]
    found = account_of(story, [])
    assert found.attempts[2].queue == 10
    assert found.total_s == 50 + 10 + 20


def test_killed_without_a_word() -> None:
    """The head node died at 100 (last event 98); Slurm queued the job again at 130, and it started at 150."""
    story = [attempt(1, 0, None, ending=Ending.killed), attempt(2, 150, 200, queued_since=130.0)]
    happened = events(1, (15, "start", 0), (20, "ready", 0), (98, "step", 78)) + events(2, (165, "start", 78))
    account = account_of(story, happened)
    assert account.attempts[1] == Seconds(preflight=10, rendezvous=10, training=78, ending=32)
    assert account.attempts[2].queue == 20
    unknown = account_of([story[0], dataclasses.replace(story[1], queued_since=None)], happened)
    assert unknown.attempts[1].ending == 0
    assert unknown.attempts[2].queue == 52


def test_a_living_run() -> None:
    running = [attempt(1, 0, None, ending=Ending.killed)]
    happened = events(1, (15, "start", 0), (20, "ready", 0), (98, "step", 78))
    assert account_of(running, happened, now=100).total_s == 100
    assert account_of(running, happened).total_s == 98
    queued_again = [attempt(1, 0, 50, ending=Ending.preempted)]
    assert account_of(queued_again, [], now=90).attempts[1].queue == 40
    assert account_of([], []).goodput_percent is None
    preflight = [attempt(1, 0, None, chosen=None)]
    assert causes(account_of(preflight, [], now=7)) == {"preflight": 7}


def test_a_scripts_time_counts_as_training() -> None:
    assert causes(account_of([attempt(1, 0, 100, exit_code=0)], [])) == {"preflight": 10, "training": 90}


def test_an_asynchronous_save_costs_its_stall_alone() -> None:
    happened = events(1, (15, "start", 0), (20, "ready", 0), (60, "checkpoint", 40, 30.0), (100, "done", 80))
    happened[2]["stall_s"] = 0.5
    account = account_of([attempt(1, 0, 100, exit_code=0)], happened)
    assert (account.sum.checkpoint, account.sum.training) == (0.5, 79.5)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60), st.integers(0, 50)), min_size=1, max_size=6))
def test_the_causes_add_up_to_the_whole(shape: list[tuple[int, int, int]]) -> None:
    """Whatever the later attempts go on from: no second is counted twice, none is lost."""
    story, happened, at = [], [], 0.0
    for number, (wait, train, resumed) in enumerate(shape, start=1):
        begin = at + wait
        story.append(attempt(number, begin, begin + 20 + train + 3, queued_since=at))
        saves = [(begin + 20 + train / 2, "checkpoint", resumed + train // 2, 0.0)]
        happened += events(
            number,
            (begin + 15, "start", resumed), (begin + 20, "ready", resumed),
            *saves, (begin + 20 + train, "step", resumed + train),
        )  # fmt: skip
        at = begin + 20 + train + 3
    account = account_of(story, happened)
    assert account.total_s == pytest.approx(at)
    assert all(value >= 0 for seconds in account.attempts.values() for value in seconds.by_cause().values())
    assert sum(account.percent().values()) == pytest.approx(100)
