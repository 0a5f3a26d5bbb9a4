"""Frames: messages of several nodes that share one output."""

from __future__ import annotations

import base64
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun import frames

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
long_values = st.integers(0, 4000).map(lambda n: "é" * n)
node_names = st.from_regex(r"[a-z][a-z0-9.-]{0,9}", fullmatch=True)


def _interleave(pieces: list[list[str]], rng: random.Random) -> list[str]:
    """All lines, those of one piece in their order."""
    order = [i for i, lines in enumerate(pieces) for _ in lines]
    rng.shuffle(order)
    left = [iter(lines) for lines in pieces]
    return [next(left[i]) for i in order]


@given(st.dictionaries(node_names, json_values | long_values, max_size=5), st.randoms(use_true_random=False))
def test_any_interleaving_of_whole_lines(messages: dict[str, Any], rng: random.Random) -> None:
    pieces = [frames.encode("k", node, value).splitlines() for node, value in messages.items()]
    assert frames.decode("k", _interleave(pieces, rng)) == messages


@given(node_names, json_values | long_values)
def test_lines_fit_into_what_srun_passes_on_whole(node: str, value: Any) -> None:
    text = frames.encode("preflight", node, value)
    assert text.endswith("\n")
    assert all(len(line.encode()) < 1024 for line in text.splitlines(keepends=True))
    assert text.isascii()


@given(st.lists(st.text(max_size=30), max_size=8), st.randoms(use_true_random=False))
def test_other_output_does_no_harm(noise: list[str], rng: random.Random) -> None:
    message = frames.encode("k", "n1", {"a": "x" * 2000}).splitlines()
    lines = _interleave([message, [line for text in noise for line in text.splitlines()]], rng)
    assert frames.decode("k", lines)["n1"] == {"a": "x" * 2000}


def test_text_before_a_frame_on_its_line() -> None:
    """A program that prints without a line end comes first on the line."""
    assert frames.decode("k", ["50%" + frames.encode("k", "n1", 1)]) == {"n1": 1}


def test_other_kinds_are_passed_over() -> None:
    lines = (frames.encode("outcome", "n1", 1) + frames.encode("preflight", "n1", 2)).splitlines()
    assert frames.decode("preflight", lines) == {"n1": 2}


def test_the_last_message_wins() -> None:
    lines = [line for value in ("x" * 3000, "y" * 900, 3) for line in frames.encode("k", "n1", value).splitlines()]
    assert frames.decode("k", lines) == {"n1": 3}
    assert frames.decode("k", lines[:-1]) == {"n1": "y" * 900}


def test_a_message_cut_short_is_none() -> None:
    whole = frames.encode("k", "n1", "x" * 3000).splitlines()
    for cut in range(len(whole)):
        assert frames.decode("k", whole[:cut]) == {}


def test_after_a_message_cut_short_the_next_one_counts() -> None:
    cut = frames.encode("k", "n1", "x" * 3000).splitlines()[:-1]
    assert frames.decode("k", [*cut, *frames.encode("k", "n1", "y" * 1000).splitlines()]) == {"n1": "y" * 1000}


@pytest.mark.parametrize(
    "damaged",
    [
        "@@clusterrun k n2 1/1 %%%",
        "@@clusterrun k n2 1/1 abc",
        "@@clusterrun k n2 0/1 bnVsbA==",
        "@@clusterrun k n2 7/1 bnVsbA==",
        "@@clusterrun k n2 1/0 bnVsbA==",
        f"@@clusterrun k n2 1/1 {base64.b64encode(b'{no json').decode()}",
        f"@@clusterrun k n2 1/1 {base64.b64encode(bytes([255, 254])).decode()}",
        f"@@clusterrun k n2 {'9' * 5000}/1 bnVsbA==",
        "@@clusterrun k n2",
    ],
)
def test_a_damaged_message_hides_no_other(damaged: str) -> None:
    good = frames.encode("k", "n1", "good").splitlines()
    assert frames.decode("k", [damaged, *good, damaged]) == {"n1": "good"}
