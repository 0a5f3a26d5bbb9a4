"""The ledger: what it remembers, and when a run has stalled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterrun.ledger import Ending, Ledger

LIMIT = Ending.time_limit


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


class Story:
    """Writes attempts as the conductor does. Steps are those of the newest checkpoint."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def attempt(
        self,
        before: int | None,
        after: int | None = None,
        ending: Ending = LIMIT,
        *,
        progressed: bool = False,
        exit_code: int | None = None,
    ) -> None:
        number = self.ledger.start(reason="r", job_id="1", saved_before=before)
        self.ledger.end(number, ending, saved_after=after, progressed=progressed, exit_code=exit_code)

    def killed(self, before: int | None) -> None:
        self.ledger.start(reason="r", job_id="1", saved_before=before)


@pytest.fixture
def story(ledger: Ledger) -> Story:
    return Story(ledger)


def test_nothing_yet(ledger: Ledger) -> None:
    assert ledger.attempts() == []
    assert ledger.stalled(None) == 0
    assert not ledger.path.exists()


def test_one_attempt(ledger: Ledger) -> None:
    number = ledger.start(reason="first start", job_id="17", saved_before=None)
    assert number == 1
    (attempt,) = ledger.attempts()
    assert (attempt.is_open, attempt.ending, attempt.nodes) == (True, Ending.killed, ())
    ledger.chose(number, ["c1", "c3"])
    ledger.end(number, Ending.done, saved_after=40, exit_code=0, message="well")
    (attempt,) = ledger.attempts()
    assert (attempt.number, attempt.reason, attempt.job_id, attempt.nodes) == (1, "first start", "17", ("c1", "c3"))
    assert (attempt.saved_before, attempt.saved_after, attempt.exit_code) == (None, 40, 0)
    assert (attempt.ending, attempt.message, attempt.is_open) == (Ending.done, "well", False)
    assert attempt.ended is not None
    assert attempt.ended >= attempt.started
    assert ledger.path.stat().st_mode & 0o777 == 0o600


def test_a_later_word_on_an_end_counts(ledger: Ledger, story: Story) -> None:
    """The conductor ends an attempt, and corrects it when the requeue is refused."""
    story.attempt(None, 10)
    ledger.end(1, LIMIT, saved_after=10, exit_code=75, message="requeue refused")
    (attempt,) = ledger.attempts()
    assert (attempt.exit_code, attempt.message) == (75, "requeue refused")


def test_a_line_cut_by_a_crash_takes_no_other_with_it(ledger: Ledger, story: Story) -> None:
    story.attempt(None, 10)
    with ledger.path.open("a") as file:
        file.write('{"attempt": 2, "event": "sta')
    assert len(ledger.attempts()) == 1
    assert ledger.start(reason="after a crash", job_id="1", saved_before=10) == 2
    assert [a.reason for a in ledger.attempts()] == ["r", "after a crash"]


def test_numbers_are_never_given_twice(ledger: Ledger, story: Story) -> None:
    for step in (0, 1, 2):
        story.killed(step)
    lines = ledger.path.read_text().splitlines()
    ledger.path.write_text("\n".join([lines[0], "damaged", lines[2]]) + "\n")
    assert ledger.start(reason="r", job_id="1", saved_before=2) == 4


def test_fields_of_a_newer_version(ledger: Ledger, story: Story) -> None:
    story.killed(None)
    record = {**json.loads(ledger.path.read_text()), "colour": "green"}
    ledger.path.write_text(json.dumps(record) + "\n")
    assert ledger.attempts()[0].number == 1


class TestStalled:
    """How many of the newest attempts in a row left no newer checkpoint."""

    def test_checkpoints_advance(self, ledger: Ledger, story: Story) -> None:
        for step in (10, 20, 30):
            story.attempt(step - 10, step)
            assert ledger.stalled(step) == 0

    def test_no_checkpoint_at_all(self, ledger: Ledger, story: Story) -> None:
        for count in (1, 2, 3):
            story.attempt(None, None)
            assert ledger.stalled(None) == count

    def test_always_the_same_checkpoint(self, ledger: Ledger, story: Story) -> None:
        story.attempt(None, 10)
        for count in (1, 2, 3):
            story.attempt(10, 10)
            assert ledger.stalled(10) == count

    def test_a_lost_checkpoint_is_no_progress(self, ledger: Ledger, story: Story) -> None:
        """The newest was set aside as damaged, so the attempt ends with an older one than it began with."""
        story.attempt(20, 10)
        assert ledger.stalled(10) == 1

    def test_the_first_checkpoint_may_be_step_0(self, ledger: Ledger, story: Story) -> None:
        story.attempt(None, 0)
        assert ledger.stalled(0) == 0

    def test_progress_starts_the_count_afresh(self, ledger: Ledger, story: Story) -> None:
        story.attempt(None, None)
        story.attempt(None, None)
        story.attempt(None, 5)
        assert ledger.stalled(5) == 0
        story.attempt(5, 5)
        assert ledger.stalled(5) == 1

    def test_killed_before_it_saved(self, ledger: Ledger, story: Story) -> None:
        for count in (1, 2, 3):
            story.killed(10)
            assert ledger.stalled(10) == count

    def test_killed_after_it_saved(self, ledger: Ledger, story: Story) -> None:
        """It wrote no end; what is on disk says what it did."""
        story.killed(10)
        assert ledger.stalled(20) == 0

    def test_several_killed_of_which_one_saved(self, ledger: Ledger, story: Story) -> None:
        story.killed(None)
        story.killed(None)  # this one saved step 10, as the next one found
        story.killed(10)
        assert ledger.stalled(10) == 1
        story.killed(10)
        assert ledger.stalled(10) == 2

    def test_killed_with_a_checkpoint_that_was_lost_later(self, ledger: Ledger, story: Story) -> None:
        story.killed(15)  # saved step 20, as the next one found
        story.killed(20)  # found step 20 damaged and set it aside
        assert ledger.stalled(10) == 1

    def test_killed_then_ended(self, ledger: Ledger, story: Story) -> None:
        story.killed(10)
        story.attempt(10, 10)
        assert ledger.stalled(10) == 2
        story.attempt(10, 15)
        assert ledger.stalled(15) == 0

    @pytest.mark.parametrize("ending", [Ending.preflight_refused, Ending.not_enough_nodes, Ending.cancelled])
    def test_attempts_that_never_trained_do_not_count(self, ending: Ending, ledger: Ledger, story: Story) -> None:
        story.attempt(10, 10)
        for _ in range(5):
            story.attempt(10, 10, ending)
        assert ledger.stalled(10) == 1
        story.attempt(10, 10)
        assert ledger.stalled(10) == 2

    def test_a_refusal_after_one_that_was_killed(self, ledger: Ledger, story: Story) -> None:
        story.killed(10)
        story.attempt(20, 20, Ending.preflight_refused)
        assert ledger.stalled(20) == 0  # the killed one had saved step 20

    def test_scripts_keep_checkpoints_of_their_own(self, ledger: Ledger, story: Story) -> None:
        for _ in range(5):
            story.attempt(None, None, progressed=True)
            assert ledger.stalled(None) == 0
        story.attempt(None, None)
        assert ledger.stalled(None) == 1

    @pytest.mark.parametrize("ending", [Ending.crashed, Ending.node_lost, Ending.preempted, Ending.stopped, LIMIT])
    def test_every_other_end_counts(self, ending: Ending, ledger: Ledger, story: Story) -> None:
        story.attempt(7, 7, ending)
        assert ledger.stalled(7) == 1

    def test_whoever_resumes_a_run_that_gave_up_gets_new_tries(self, ledger: Ledger, story: Story) -> None:
        story.attempt(None, None)
        story.attempt(None, None)
        story.attempt(None, None, exit_code=93)
        assert ledger.stalled(None) == 0
        story.attempt(None, None)
        assert ledger.stalled(None) == 1


def test_notices_belong_to_their_attempt_and_change_nothing_else(ledger: Ledger, story: Story) -> None:
    story.attempt(None, 10)
    number = ledger.start(reason="r", job_id="1", saved_before=10, queued_since=5.0)
    ledger.notice(number, "straggler", "rank 3 on c2 is slow", node="c2", rank=3)
    ledger.notice(number, "hung", "no step", node="c1")
    first, second = ledger.attempts()
    assert first.notices == ()
    assert [(n.kind, n.node, n.rank) for n in second.notices] == [("straggler", "c2", 3), ("hung", "c1", None)]
    assert second.queued_since == 5.0
    assert second.is_open


def test_the_same_error_at_the_same_step(ledger: Ledger) -> None:
    def crash(error: str | None, step: int | None, exit_code: int | None = None) -> bool:
        number = ledger.start(reason="r", job_id="1", saved_before=None)
        ledger.end(number, Ending.crashed, saved_after=None, error=error, step=step, exit_code=exit_code)
        return ledger.same_error_again()

    assert not crash("killed", 7)
    assert not crash("killed", 9)
    assert not crash("killed otherwise", 9)
    assert crash("killed otherwise", 9)
    assert not crash(None, 9)
    assert not crash(None, 9)
    assert not crash("before the first step", None)
    assert not crash("before the first step", None)
    assert not crash("boom", 3, exit_code=93)
    assert not crash("boom", 3)  # resumed by a person: new tries
    assert crash("boom", 3)
