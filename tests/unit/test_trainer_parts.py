"""Parts of the trainer that need no second process."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from clusterrun.config.schema import Schedule, TrainConfig
from clusterrun.errors import ConfigError
from clusterrun.rundir import read_json_lines
from clusterrun.train.events import EventLog
from clusterrun.train.optim import learning_rate
from clusterrun.train.polling import MOST_TICKS, Agreed, Poll
from clusterrun.train.recorder import Recorder
from clusterrun.train.rng import preserved_rng, restore_rng, rng_state, seed_everywhere
from clusterrun.train.stopping import StopFlag

CPU = torch.device("cpu")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def draw() -> tuple[float, ...]:
    """One number from each generator; an odd count of normals leaves a cached one behind."""
    return (random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(1)))


def test_random_state_round_trip_with_cached_normals() -> None:
    seed_everywhere(1, 2, 3)
    draw()
    state = rng_state(CPU)
    expected = [draw() for _ in range(3)]
    seed_everywhere(9)
    restore_rng(state, CPU)
    assert [draw() for _ in range(3)] == expected


def test_what_runs_inside_leaves_no_trace() -> None:
    seed_everywhere(1)
    expected = [draw(), draw()]
    seed_everywhere(1)
    first = draw()
    with preserved_rng(CPU):
        draw()
    assert [first, draw()] == expected


def test_ranks_draw_different_numbers() -> None:
    drawn = []
    for parts in ((5,), (5, 1, 0), (5, 1, 1), (5, 1, 2), (5, 101, 0)):
        seed_everywhere(*parts)
        drawn.append(draw())
    assert len({number for numbers in drawn for number in numbers}) == 15


def test_learning_rate_schedules() -> None:
    constant = TrainConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(step, 10, constant) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = TrainConfig(lr=1.0, schedule=Schedule.linear)
    assert [learning_rate(step, 4, linear) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    cosine = TrainConfig(lr=2.0, schedule=Schedule.cosine, warmup_steps=2)
    rates = [learning_rate(step, 12, cosine) for step in range(12)]
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[7] == pytest.approx(1.0)


def test_a_signal_sets_the_flag_and_a_second_one_changes_nothing() -> None:
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    try:
        flag = StopFlag()
        flag.install()
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.received is None
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.received is signal.SIGUSR2
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def test_polls_come_about_every_quarter_second(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for per_tick, distance in ((0.01, 25), (0.5, 1), (1e-6, MOST_TICKS)):
        poll = Poll(StopFlag(), CPU)
        polled_at = []
        for tick in range(1, 4000):
            now[0] += per_tick
            if poll.tick():
                poll.agree()
                polled_at.append(tick)
        assert polled_at[0] == 1  # nothing is known before the first
        assert polled_at[-1] - polled_at[-2] == pytest.approx(distance, abs=1)


def test_a_poll_carries_the_signal_and_the_losses(alone: None) -> None:
    flag = StopFlag()
    poll = Poll(flag, CPU)
    assert poll.agree() == Agreed(None, [], [])
    flag.received = signal.SIGUSR2
    third = torch.tensor(1 / 3)
    agreed = poll.agree([third, torch.tensor([2.0], dtype=torch.float64)], [1.0, 0.0])
    assert agreed == Agreed(signal.SIGUSR2, [third.item(), 2.0], [1.0, 0.0])


def test_events_are_appended_and_a_broken_tail_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "node.0.jsonl"
    log = EventLog(file, 0)
    log.write("ready", step=3)
    log.close()
    with file.open("a") as stream:
        stream.write('{"t": 1, "kind": "st')  # killed in the middle of a line
    log = EventLog(file, 0)
    log.write("stopped", step=4, signal="SIGTERM")
    log.error(ValueError("text\nof two lines"))
    records = list(read_json_lines(file))
    assert [record["kind"] for record in records] == ["ready", "stopped", "error"]
    assert records[2]["step"] == 4
    assert (records[2]["type"], records[2]["message"]) == ("ValueError", "text\nof two lines")
    assert all(record["rank"] == 0 for record in records)


def test_steps_are_written_together_and_the_last_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node.0.jsonl"
    times = {"samples_per_s": 10.0, "step_time_s": 0.1, "data_time_s": 0.01, "comm_time_s": None}
    rows = [{"step": step, "loss": 1 / step, "lr": 0.1, **times} for step in (10, 20, 30)]
    log = EventLog(file, 0)
    Recorder(log, None).steps(rows)
    records = list(read_json_lines(file))
    assert [(r["kind"], r["rank"], r["step"], r["loss"]) for r in records] == [
        ("step", 0, row["step"], row["loss"]) for row in rows
    ]
    assert log.step == 30
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith("step 30  loss 0.0333")


def test_a_full_disk_loses_events_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.0.jsonl"
    log = EventLog(file, 0)
    log.write("ready", step=1)
    write = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:5], at))  # room for five bytes more
        log.write("ready", step=2)
        log.write("ready", step=3)
    log.write("ready", step=4)
    assert [record["step"] for record in read_json_lines(file)] == [1, 4]
    assert capsys.readouterr().err.count("events are lost") == 1


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_under_standard_output_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(EventLog(tmp_path / "e.jsonl", 0), None)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        patch.setattr(sys, "stderr", Full())
        recorder.say("hello")
        recorder.warning("hello")


def test_tensorboard_that_is_missing_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'clusterrun\[tensorboard\]'"):
        Recorder(EventLog(tmp_path / "e.jsonl", 0), tmp_path / "tensorboard")
    Recorder(EventLog(tmp_path / "e.jsonl", 1), tmp_path / "tensorboard")  # rank 1 does not need it
