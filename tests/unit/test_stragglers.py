"""Ranks that are slower than their peers, from each rank's own time in a step."""

from __future__ import annotations

from clusterrun.launch.stragglers import Stragglers

EVEN = {rank: (0.100 + rank * 0.001, 0.01) for rank in range(8)}


def test_even_ranks_are_never_named() -> None:
    watch = Stragglers(factor=1.5, for_s=0)
    assert not any(watch.update(now, EVEN) for now in range(100))


def test_named_once_after_a_while_and_again_after_a_recovery() -> None:
    watch = Stragglers(factor=1.5, for_s=60)
    slow = {**EVEN, 3: (0.250, 0.01)}
    assert [now for now in range(0, 200, 10) if watch.update(now, slow)] == [60]
    watch.update(200, EVEN)
    assert [now for now in range(210, 400, 10) if watch.update(now, slow)] == [270]


def test_a_moment_is_nothing() -> None:
    watch = Stragglers(factor=1.5, for_s=60)
    for now in range(0, 1000, 50):
        assert not watch.update(now, {**EVEN, 3: (0.250, 0.01)} if now % 100 else EVEN)


def test_what_is_said() -> None:
    (found,) = Stragglers(1.5, 0).update(0, {**EVEN, 3: (0.309, 0.01)})
    assert (found.rank, round(found.factor, 1), found.data_share) == (3, 3.0, 0.0)
    assert str(found) == "rank 3 is a straggler: a step takes it 309.0 ms of its own, 3.0 times its peers' 104.0 ms"
    (found,) = Stragglers(1.5, 0).update(0, {**EVEN, 3: (0.309, 0.18)})
    assert str(found).endswith(", most of it waiting for data")


def test_two_ranks_and_one() -> None:
    assert [s.rank for s in Stragglers(1.5, 0).update(0, {0: (0.1, 0), 1: (0.2, 0)})] == [1]
    assert Stragglers(1.5, 0).update(0, {0: (0.1, 0)}) == []


def test_unknown_times_and_tiny_steps_and_off() -> None:
    assert Stragglers(1.5, 0).update(0, {0: (0.0, 0), 1: (0.0, 0), 2: (0.2, 0)}) == []
    assert Stragglers(1.5, 0).update(0, {0: (0.001, 0), 1: (0.001, 0), 2: (0.002, 0)}) == []
    assert Stragglers(0, 0).update(0, {**EVEN, 3: (1.0, 0)}) == []
