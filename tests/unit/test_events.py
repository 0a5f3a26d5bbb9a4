"""Events while they are written, and what the follower says of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from clusterrun.ledger import Ending, Ledger
from clusterrun.report import follow as following
from clusterrun.report.events import EventTail, Progress
from clusterrun.rundir import RunDir

START = {
    "kind": "start",
    "step": 0,
    "total_steps": 100,
    "world_size": 4,
    "global_batch": 64,
    "batch_per_rank": 16,
    "resumed_from": None,
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, "run")
    run.attempt(1).make()
    return run


def write(run: RunDir, *records: dict[str, Any], attempt: int = 1, node: str = "c1", rank: int = 0) -> None:
    with run.attempt(attempt).event_file(node, rank).open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": 1 / number, "samples_per_s": 640.0, **more}


class TestTail:
    def test_only_what_is_new(self, run: RunDir) -> None:
        tail = EventTail(run)
        assert tail.new() == []
        write(run, step(1), step(2))
        assert [record["step"] for record in tail.new()] == [1, 2]
        assert tail.new() == []
        write(run, step(3))
        assert [record["step"] for record in tail.new()] == [3]

    def test_one_rank_over_all_attempts(self, run: RunDir) -> None:
        run.attempt(2).make()
        write(run, step(1))
        write(run, step(9), rank=1)
        write(run, step(2), attempt=2, node="c7")
        assert [(r["step"], r["attempt"]) for r in EventTail(run).new()] == [(1, 1), (2, 2)]
        assert [r["step"] for r in EventTail(run, rank=1).new()] == [9]

    def test_a_line_still_being_written_waits(self, run: RunDir) -> None:
        tail = EventTail(run)
        line = json.dumps(step(1)) + "\n"
        for cut in range(0, len(line), 7):
            with run.attempt(1).event_file("c1", 0).open("a") as file:
                file.write(line[cut : cut + 7])
            if cut + 7 < len(line):
                assert tail.new() == []
        assert [record["step"] for record in tail.new()] == [1]

    @pytest.mark.parametrize("damage", [b'{"kind": "st\n', b"\0\0\0\0\0\n", b"\xff\xfe\n", b"3\n", b"\n", b"[1]\n"])
    def test_what_a_crash_left_is_passed_over(self, damage: bytes, run: RunDir) -> None:
        write(run, step(1))
        with run.attempt(1).event_file("c1", 0).open("ab") as file:
            file.write(damage)
        write(run, step(2))
        tail = EventTail(run)
        assert [record["step"] for record in tail.new()] == [1, 2]
        assert tail.new() == []


@given(st.data())
def test_reading_in_any_pieces_gives_every_record_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = RunDir.create(tmp_path_factory.mktemp("runs"), "run")
    run.attempt(1).make()
    records = [step(n, note="é" * n) for n in range(1, data.draw(st.integers(1, 6)) + 1)]
    whole = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=6)))
    tail, seen = EventTail(run), []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        with run.attempt(1).event_file("c1", 0).open("ab") as file:
            file.write(whole[begin:end])
        seen += tail.new()
    assert seen == [{**record, "attempt": 1} for record in records]


class TestProgress:
    @staticmethod
    def after(*records: dict[str, Any]) -> Progress:
        progress = Progress()
        for record in records:
            progress.take(record)
        return progress

    def test_a_story(self) -> None:
        p = self.after(
            START,
            step(10, epoch=1),
            {"kind": "eval", "step": 10, "metric": "accuracy", "value": 0.9},
            {"kind": "checkpoint", "step": 10, "ok": True},
            {"kind": "checkpoint", "step": 20, "ok": False, "reason": "every_steps", "problem": "disk full"},
            step(20, epoch=2),
            {"kind": "of a newer version"},
        )
        assert (p.step, p.total_steps, p.epoch, p.world_size) == (20, 100, 2, 4)
        assert (p.loss, p.metric, p.value, p.saved_step) == (0.05, "accuracy", 0.9, 10)
        assert p.warnings == ["checkpoint at step 20 failed: disk full"]
        assert not p.finished
        p.take({"kind": "done", "step": 100})
        assert (p.finished, p.step) == (True, 100)

    def test_errors_name_their_rank(self) -> None:
        p = self.after(START, {"kind": "error", "rank": 3, "step": 7, "message": "boom"})
        assert p.errors == ["rank 3, step 7: boom"]

    def test_a_resume_goes_back_to_its_checkpoint(self) -> None:
        p = self.after(START, step(50), {**START, "step": 40, "resumed_from": 40})
        assert (p.step, p.resumed_from) == (40, 40)

    def test_time_left(self) -> None:
        assert self.after(START).eta_s is None
        assert self.after(START, step(20)).eta_s == (100 - 20) * 64 / 640
        assert self.after(step(20)).eta_s is None

    def test_in_one_line(self) -> None:
        p = self.after(START, step(20), {"kind": "eval", "metric": "accuracy", "value": 0.5})
        assert following.detail(p) == "step 20/100, loss 0.0500, accuracy 0.5000, 640 samples/s, ETA 0:08"
        assert following.detail(self.after(START)) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599.5, "1:00:00"), (3723, "1:02:03"), (90000, "25:00:00")],
)
def test_clock(seconds: float, text: str) -> None:
    assert following.clock(seconds) == text


class TestFollow:
    """Followed runs, without a job behind them: the ledger and the events are the real thing."""

    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("_POLL_S", "_STATE_EVERY_S", "_LAST_WORDS_S", "_ENDING_S"):
            monkeypatch.setattr(following, name, 0.02)

    @staticmethod
    def follow(run: RunDir, state: str = "ended", before: int = 0) -> tuple[following.Followed, str]:
        console = Console(file=io.StringIO(), width=200)
        followed = following.follow(run, before, lambda: (state, ""), console)
        assert isinstance(console.file, io.StringIO)
        return followed, console.file.getvalue()

    def test_done(self, run: RunDir) -> None:
        write(
            run, START, step(100), {"kind": "eval", "metric": "accuracy", "value": 0.9}, {"kind": "done", "step": 100}
        )
        ledger = Ledger(run.ledger)
        ledger.end(ledger.start(reason="", job_id="1", saved_before=None), Ending.done, saved_after=100, exit_code=0)
        followed, _ = self.follow(run)
        assert followed.exit_code == 0
        lines = following.summary(run, followed)
        assert lines[0] == "run: done, accuracy 0.9000"
        assert "step 100 of 100, loss 0.010000" in lines[1]
        assert not any("resume" in line or "logs" in line for line in lines)

    @pytest.mark.parametrize(("ending", "code"), [(Ending.cancelled, 130), (Ending.time_limit, 75)])
    def test_stopped_says_how_to_go_on(self, ending: Ending, code: int, run: RunDir) -> None:
        ledger = Ledger(run.ledger)
        ledger.end(ledger.start(reason="", job_id="1", saved_before=None), ending, saved_after=5, exit_code=code)
        followed, _ = self.follow(run)
        assert followed.exit_code == code
        assert following.summary(run, followed)[-1] == f"  go on with: clusterrun resume {run.root}"

    def test_failed_says_where_the_logs_are(self, run: RunDir) -> None:
        ledger = Ledger(run.ledger)
        number = ledger.start(reason="", job_id="1", saved_before=None)
        ledger.end(number, Ending.user_code_failed, saved_after=None, exit_code=1, message="c1: rank 3: boom")
        followed, _ = self.follow(run)
        lines = following.summary(run, followed)
        assert (followed.exit_code, lines[0]) == (1, "run: user_code_failed")
        assert lines[1] == "  c1: rank 3: boom"
        assert f"  logs: {run.attempt(1).logs}" in lines

    def test_a_job_that_ended_without_a_word(self, run: RunDir) -> None:
        Ledger(run.ledger).start(reason="", job_id="1", saved_before=None)
        followed, said = self.follow(run)
        assert followed.exit_code == 1
        assert str(run.submitit) in followed.message
        assert "preflight" in said
        assert following.summary(run, followed)[0] == "run: exit 1"

    def test_endings_of_earlier_submissions_are_old_news(self, run: RunDir) -> None:
        ledger = Ledger(run.ledger)
        ledger.end(
            ledger.start(reason="", job_id="1", saved_before=None), Ending.cancelled, saved_after=5, exit_code=130
        )
        followed, said = self.follow(run, before=1)
        assert "without a word" in followed.message
        assert "starting" in said
