"""Sizes, bandwidths, groups and the fitted line: the parts of measuring that need no torch."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.errors import ConfigError
from clusterrun.measure import collectives, groups
from clusterrun.measure.fit import fit
from clusterrun.measure.results import Row


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """Rows of real tables of nccl-tests (all_reduce, 8 ranks; time in us, algbw and busbw in GB/s)."""
    row = Row("all", tuple(range(8)), "all_reduce", 8589934592, 62_764e-6, 0, 20, 0)
    assert row.algbw / 1e9 == pytest.approx(136.86, abs=0.01)
    assert row.busbw / 1e9 == pytest.approx(239.51, abs=0.01)
    factors = {name: factor(4) for name, factor in collectives.FACTORS.items()}
    assert factors == {
        "all_reduce": 1.5,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "broadcast": 1.0,
        "all_to_all": 0.75,
    }
    assert Row.from_json(row.as_json() | {"of a newer version": 1}) == row


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["4K"], [4096]),
        (["1M-8M"], [2**20, 2**21, 2**22, 2**23]),
        (["1k-1m*32"], [2**10, 2**15, 2**20]),
        (["1G", "64", "64"], [64, 2**30]),
    ],
)
def test_sizes(texts: list[str], expected: list[int]) -> None:
    assert collectives.sizes(texts) == expected


@pytest.mark.parametrize("text", ["", "big", "8M-1M", "1", "1M-8M*1", "2000G", "-4K", "1.5M"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"bench\.sizes="):
        collectives.sizes([text])


def test_sizes_as_text() -> None:
    assert [collectives.size_text(n) for n in (8, 4096, 2**20, 3 * 2**29)] == ["8 B", "4 KiB", "1 MiB", "1.5 GiB"]


@given(st.integers(1, 17))
def test_a_tournament_meets_everybody_once_and_nobody_twice_in_a_round(members: int) -> None:
    rounds = groups.tournament(members)
    pairs = [pair for round_ in rounds for pair in round_]
    assert sorted(pairs) == list(itertools.combinations(range(members), 2))
    for round_ in rounds:
        assert len({member for pair in round_ for member in pair}) == 2 * len(round_)


@given(st.integers(2, 40))
def test_a_ring_gives_everybody_two_partners(members: int) -> None:
    rounds = groups.ring_rounds(members)
    assert len(rounds) <= 3
    pairs = [pair for round_ in rounds for pair in round_]
    assert len(set(pairs)) == len(pairs)
    for round_ in rounds:
        assert len({member for pair in round_ for member in pair}) == 2 * len(round_)
    for member in range(members):
        assert sum(member in pair for pair in pairs) == min(2, members - 1)


@pytest.mark.parametrize(
    ("wanted", "nodes", "per_node", "expected"),
    [
        (("all", "in_node", "between_nodes"), 2, 2, [("all", 1), ("in_node", 2), ("between_nodes", 1)]),
        (("all", "in_node", "between_nodes"), 1, 4, [("all", 1)]),
        (("all", "in_node", "between_nodes"), 3, 1, [("all", 1)]),
        (("in_node",), 1, 4, [("in_node", 1)]),
        (("pairs",), 2, 3, [("pairs", 2)] * 3),
        (("all", "pairs"), 1, 1, []),
    ],
)
def test_phases(wanted: tuple[str, ...], nodes: int, per_node: int, expected: list[tuple[str, int]]) -> None:
    phases = groups.bench_phases(wanted, nodes, per_node)
    assert [(phase.name, len(phase.groups)) for phase in phases] == expected
    for phase in phases:
        ranks = [rank for group in phase.groups for rank in group]
        assert len(set(ranks)) == len(ranks)
        assert all(0 <= rank < nodes * per_node for rank in ranks)


class TestFit:
    @given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
    def test_finds_the_line_it_was_given(self, alpha: float, beta: float) -> None:
        found = fit([(size, alpha + beta * size) for size in (2**10, 2**15, 2**20, 2**25)])
        assert found is not None
        assert found.worst < 1e-6
        assert found.seconds(2**22) == pytest.approx(alpha + beta * 2**22, rel=1e-6)

    def test_no_negative_terms(self) -> None:
        found = fit([(1000, 1e-3), (2000, 2.2e-3), (4000, 5e-3)])
        assert found is not None
        assert found.alpha_s == 0
        falling = fit([(1000, 2e-3), (2000, 1e-3)])
        assert falling is not None
        assert falling.beta_s_per_byte == 0

    def test_a_size_that_stands_out_does_not_bend_the_line(self) -> None:
        points = [(size, 2e-4 + size * 8e-9) for size in (2**16, 2**18, 2**20, 2**22, 2**24)]
        found = fit([(2**14, 6e-4), *points])
        assert found is not None
        assert found.alpha_s == pytest.approx(2e-4, rel=0.01)
        assert found.beta_s_per_byte == pytest.approx(8e-9, rel=0.01)
        assert found.worst > 0.4

    def test_one_size_is_no_line(self) -> None:
        assert fit([(1000, 1e-3), (1000, 2e-3)]) is None
        assert fit([]) is None
