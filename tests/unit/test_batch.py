"""Batch sizes: one rule for the plan and the trainer."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.batch import BatchSizes, batch_sizes
from clusterrun.config.schema import TrainConfig
from clusterrun.errors import ConfigError

small = st.integers(1, 64)


@given(small, small, small)
def test_per_rank(micro: int, accumulate: int, world: int) -> None:
    train = TrainConfig(batch_per_rank=micro * accumulate, accumulate=accumulate)
    assert batch_sizes(train, world) == BatchSizes(micro * accumulate * world, micro * accumulate, micro)


@given(small, small, small)
def test_both_ways_to_say_it_agree(micro: int, accumulate: int, world: int) -> None:
    whole = micro * accumulate * world
    one = batch_sizes(TrainConfig(global_batch=whole, accumulate=accumulate), world)
    assert one == batch_sizes(TrainConfig(batch_per_rank=micro * accumulate, accumulate=accumulate), world)


@given(st.integers(1, 10_000), small, small)
def test_what_does_not_divide_is_refused_with_a_number_that_does(whole: int, accumulate: int, world: int) -> None:
    unit = accumulate * world
    train = TrainConfig(global_batch=whole, accumulate=accumulate)
    if whole % unit == 0:
        sizes = batch_sizes(train, world)
        assert (sizes.global_, sizes.micro * unit) == (whole, whole)
        return
    with pytest.raises(ConfigError, match=f"train.global_batch={whole}") as refused:
        batch_sizes(train, world)
    found = re.search(r"nearest that is: (\d+)", str(refused.value))
    assert found
    nearest = int(found.group(1))
    assert nearest % unit == 0
    assert nearest == unit or abs(nearest - whole) * 2 <= unit
    assert batch_sizes(TrainConfig(global_batch=nearest, accumulate=accumulate), world).global_ == nearest


@given(st.integers(1, 1000), st.integers(2, 64))
def test_micro_batches_are_whole(per_rank: int, accumulate: int) -> None:
    train = TrainConfig(batch_per_rank=per_rank, accumulate=accumulate)
    if per_rank % accumulate == 0:
        assert batch_sizes(train, 2).micro * accumulate == per_rank
    else:
        with pytest.raises(ConfigError, match=f"train.batch_per_rank={per_rank}.*train.accumulate={accumulate}"):
            batch_sizes(train, 2)


@pytest.mark.parametrize(("per_rank", "whole"), [(None, None), (1, 4)])
def test_exactly_one(per_rank: int | None, whole: int | None) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        batch_sizes(TrainConfig(batch_per_rank=per_rank, global_batch=whole), 4)
