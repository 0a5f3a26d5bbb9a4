"""The sample order: a pure function of seed, epoch and samples consumed, whatever the world size."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.errors import ConfigError
from clusterrun.train.sampler import Position, check_batch, epoch_order, rank_slice, total_steps


def consumed_by_ranks(position: Position, seed: int, samples: int, world: int, per_rank: int) -> list[int]:
    order = epoch_order(seed, position.epoch, samples)
    return [int(i) for rank in range(world) for i in order[rank_slice(position, rank, per_rank)]]


@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(1, 300))
def test_an_epoch_is_a_permutation(seed: int, epoch: int, samples: int) -> None:
    assert sorted(epoch_order(seed, epoch, samples).tolist()) == list(range(samples))


def test_the_order_never_changes_between_versions() -> None:
    """Pinned: a resumed run under another numpy must see the same samples."""
    digest = hashlib.sha256(epoch_order(7, 3, 1000).tobytes()).hexdigest()
    assert epoch_order(7, 3, 8).tolist() == [2, 5, 7, 3, 0, 6, 4, 1]
    assert digest == "5dd4a4a3c0ab66a3fa381d4e13d0177cea3ecf0a2b878010627bba3ea72405a4"


def test_seeds_and_epochs_differ() -> None:
    orders = [epoch_order(seed, epoch, 100).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_first_places_are_uniform() -> None:
    firsts = np.bincount([epoch_order(seed, 0, 10)[0] for seed in range(2000)], minlength=10)
    assert firsts.min() > 140
    assert firsts.max() < 260


@given(st.integers(1, 4), st.integers(1, 5))
def test_global_batches_do_not_depend_on_the_world_size(world: int, per_rank: int) -> None:
    one, many = Position(), Position()
    size = world * per_rank
    for _ in range(60 // size):
        assert consumed_by_ranks(one, 1, 60, 1, size) == consumed_by_ranks(many, 1, 60, world, per_rank)
        one.advance(60, size)
        many.advance(60, size)


@given(st.integers(0, 6), st.sampled_from([(1, 4), (2, 3), (3, 5), (5, 2)]))
def test_another_world_size_loses_and_repeats_nothing(steps: int, other: tuple[int, int]) -> None:
    """6 steps of 2 ranks x 4, then the rest of the epoch with another world and batch."""
    position, seen = Position(), list[int]()
    for _ in range(steps):
        seen += consumed_by_ranks(position, 3, 61, 2, 4)
        position.advance(61, 8)
    world, per_rank = other
    position.begin_epoch_if_ended(61, world * per_rank)
    while position.epoch == 0:
        seen += consumed_by_ranks(position, 3, 61, world, per_rank)
        position.advance(61, world * per_rank)
    assert seen == epoch_order(3, 0, 61)[: len(seen)].tolist()
    assert len(seen) > 61 - max(8, world * per_rank)


def test_the_incomplete_last_batch_is_dropped() -> None:
    position = Position()
    for _ in range(3):
        position.advance(10, 3)
    assert position == Position(step=3, epoch=1, consumed=0)
    assert position.at_epoch_end
    assert not Position().at_epoch_end


def test_total_steps() -> None:
    assert total_steps(Position(), 10, 3, epochs=2, max_steps=None) == 6
    assert total_steps(Position(), 10, 3, epochs=2, max_steps=4) == 4
    assert total_steps(Position(step=2, epoch=0, consumed=6), 10, 3, epochs=2, max_steps=None) == 6
    assert total_steps(Position(step=3, epoch=1, consumed=0), 10, 3, epochs=2, max_steps=None) == 6
    # resumed with a larger batch, of which no whole one is left in this epoch
    assert total_steps(Position(step=2, epoch=0, consumed=6), 10, 5, epochs=2, max_steps=None) == 4
    # shortened below what is done
    assert total_steps(Position(step=5, epoch=1, consumed=6), 10, 3, epochs=2, max_steps=2) == 5
    assert total_steps(Position(step=6, epoch=2, consumed=0), 10, 3, epochs=2, max_steps=None) == 6


def test_total_steps_does_not_move_the_position() -> None:
    position = Position(step=2, epoch=0, consumed=6)
    before = replace(position)
    total_steps(position, 10, 5, epochs=2, max_steps=None)
    assert position == before


def test_too_little_data_says_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"31 samples.*global batch of 32"):
        check_batch(31, 32)
    check_batch(32, 32)
