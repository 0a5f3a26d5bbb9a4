"""From rates of pairs to who is slow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.measure.blame import blame, is_slow, usual_among, usual_best
from clusterrun.measure.groups import ring_rounds

BELOW = 0.75
Rates = dict[tuple[int, int], float | None]


def ring(members: int) -> Rates:
    return {pair: 100.0 for round_ in ring_rounds(members) for pair in round_}


def slowed(rates: Rates, *members: int, to: float | None = 10.0) -> Rates:
    return {pair: to if set(pair) & set(members) else rate for pair, rate in rates.items()}


@given(st.integers(3, 12), st.data())
def test_one_slow_member_of_a_ring_is_named_and_nobody_else(members: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, members - 1))
    for to in (10.0, None):
        who = blame(slowed(ring(members), bad, to=to), BELOW)
        assert (who.members, who.pairs) == ((bad,), ()), (members, bad, to)


@given(st.integers(4, 9), st.data())
def test_one_slow_member_of_all_pairs(members: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, members - 1))
    rates: Rates = dict.fromkeys(itertools.combinations(range(members), 2), 100.0)
    assert blame(slowed(rates, bad), BELOW).members == (bad,)


@given(st.integers(4, 12), st.data())
def test_one_slow_pair_is_named_and_no_member(members: int, data: st.DataObject) -> None:
    rates = ring(members)
    bad = data.draw(st.sampled_from(sorted(rates)))
    who = blame(rates | {bad: 10.0}, BELOW)
    assert (who.members, who.pairs) == ((), (bad,))


def test_two_slow_neighbours() -> None:
    who = blame(slowed(ring(6), 2, 3), BELOW)
    assert (sorted(who.members), who.pairs) == ([2, 3], ())


def test_nothing_is_slow() -> None:
    who = blame({pair: 100.0 + sum(pair) for pair in ring(6)}, BELOW)
    assert (who.members, who.pairs, who.suspects) == ((), (), set())


def test_a_single_pair_has_nothing_to_be_held_against_unless_it_hangs() -> None:
    assert blame({(0, 1): 1e-9}, BELOW).expected is None
    assert blame({(0, 1): 1e-9}, BELOW).suspects == set()
    assert blame({(0, 1): None}, BELOW).pairs == ((0, 1),)
    assert blame({(0, 1): 50.0}, BELOW, expected=100.0).pairs == ((0, 1),)


def test_of_two_members_the_one_that_is_fast_elsewhere_is_not_to_blame() -> None:
    who = blame({(0, 1): None, (1, 2): 100.0}, BELOW)
    assert (who.members, who.pairs) == ((0,), ())


def test_the_usual_rate_is_not_dragged_down_by_the_slow_one() -> None:
    assert usual_best(slowed(ring(3), 1)) == 100.0
    assert usual_best(slowed(ring(4), 1)) == 100.0
    assert usual_best(slowed(ring(4), 0, 1, 2, 3, to=None)) is None


@pytest.mark.parametrize(
    ("own", "peers", "slow"),
    [
        (100.0, [], None),
        (100.0, [100.0, 101.0], False),
        (10.0, [100.0, 101.0], True),
        (70.0, [100.0, 100.0, 100.0], True),
        (76.0, [100.0, 100.0, 100.0], False),
        (70.0, [70.0, 100.0, 130.0], False),  # peers that differ so much themselves
    ],
)
def test_a_value_among_its_peers(own: float, peers: list[float], slow: bool | None) -> None:
    assert is_slow(own, peers, BELOW) is slow


def test_the_spread_of_peers() -> None:
    assert usual_among(1.0, [1.0, 2.0, 4.0]) == (2.0, pytest.approx(3 * 1.4826))
