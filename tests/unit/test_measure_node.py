"""The ranks of a slow check are killed when they hang, and what they were at is said. Real processes, real Gloo."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from clusterrun.measure.groups import BY_ITSELF
from clusterrun.measure.node import Ranks, measure_node
from clusterrun.measure.results import IMPORT, Job, Work
from clusterrun.network import free_port

WORK = Work("cpu", 3, BY_ITSELF, 2**20, timeout_s=20, devices=True)


def test_a_sound_node(capfd: pytest.CaptureFixture[str]) -> None:
    found = measure_node("c1", WORK, "127.0.0.1")
    assert found.stuck == ()
    assert [device.local for device in found.devices] == [0, 1, 2]
    for device in found.devices:
        assert device.flops is not None
        assert device.flops > 1e8
        assert device.repeatable
        assert device.to_device is not None
        assert device.to_device > 1e7
    assert [(row.phase, row.ranks) for row in found.rows] == [
        ("in_node", (0, 1, 2)),
        ("pairs", (1, 2)),
        ("pairs", (0, 2)),
        ("pairs", (0, 1)),
    ]
    assert all(row.wrong == 0 and row.iterations >= 3 for row in found.rows)
    assert found.ports
    assert capfd.readouterr().err == ""


def test_a_rank_that_hangs_before_it_has_begun() -> None:
    begin = time.monotonic()
    found = measure_node("c1", dataclasses.replace(WORK, timeout_s=0.2), "127.0.0.1")
    assert time.monotonic() - begin < 20
    assert {(one.what, one.why) for one in found.stuck} == {(IMPORT, "no answer in 0.2 s")}
    assert found.rows == ()


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGSTOP, "no answer in 2 s"), (signal.SIGKILL, "killed by SIGKILL")]
)
def test_a_rank_that_hangs_or_dies_in_a_collective(number: signal.Signals, why: str) -> None:
    work = dataclasses.replace(WORK, devices=False, size=2**24)
    job = Job(("c1",), f"127.0.0.1:{free_port('127.0.0.1', str(os.getpid()))}", "token")
    ranks = Ranks("c1", work, job, "127.0.0.1", 0)
    running = threading.Thread(target=ranks.run)
    running.start()
    while ranks.ranks[2].what != "in_node":
        assert running.is_alive()
        time.sleep(0.005)
    ranks.timeout_s = 2.0
    os.kill(ranks.ranks[2].process.pid, number)
    running.join(timeout=60)
    assert not running.is_alive()
    assert [(one.what, one.ranks) for one in ranks.stuck] == [("in_node", (0, 1, 2))]
    if number == signal.SIGSTOP:
        assert ranks.stuck[0].why == why
    else:  # its peers may have noticed before we did
        assert ranks.stuck[0].why == why or "Connection" in ranks.stuck[0].why
    assert not [rank for rank in ranks.ranks if Path(f"/proc/{rank.process.pid}").exists()]
