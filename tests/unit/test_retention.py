"""Which checkpoints stay, and what the store does with the answer."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.checkpoint.manifest import Manifest
from clusterrun.checkpoint.retention import Keep, Score
from clusterrun.checkpoint.store import SCORES, Store
from clusterrun.config.schema import BestBy


def publish(store: Store, step: int) -> None:
    temporary, nonce = store.new_temporary(step, 0)
    store.publish(temporary, Manifest(step, 1, 0, nonce, "", time.time(), {}, {}), pytest.fail)


def steps(store: Store) -> list[int]:
    return [info.step for info in store.list()]


def train(store: Store, keep: Keep, upto: int, every: int, scores: dict[int, Score]) -> None:
    """Save and validate as a run does."""
    for step in range(every, upto + 1, every):
        publish(store, step)
        store.retain(keep, pytest.fail)
        if step in scores:
            store.add_score(step, scores[step], pytest.fail)


def test_every_nth_stays_although_saves_do_not_fall_on_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    train(store, Keep(2, every_steps=100), 420, 30, {})
    assert steps(store) == [420, 390, 300, 210, 120]


def test_the_best_stay(tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan"), 50: 2.5, 60: 2.0}
    store = Store(tmp_path)
    train(store, Keep(2, best=2), 100, 10, {step: Score(loss, -loss) for step, loss in losses.items()})
    assert steps(store) == [100, 90, 60, 20]  # of the two with 2.0 the newer


@pytest.mark.parametrize(
    ("by", "best"), [(BestBy.loss, [1, 2]), (BestBy.metric_max, [2, 3]), (BestBy.metric_min, [1, 3])]
)
def test_what_best_means(by: BestBy, best: list[int]) -> None:
    scores = {1: Score(0.1, 0.1), 2: Score(0.2, 0.9), 3: Score(0.3, 0.5)}
    ranking = {BestBy.loss: [1, 2, 3], BestBy.metric_max: [2, 3, 1], BestBy.metric_min: [1, 3, 2]}[by]
    keep = Keep(2, best=2, best_by=by)
    assert keep.ranking([1, 2, 3], scores) == ranking
    assert sorted(ranking[:2]) == best
    assert keep.is_among_the_best(3, [1, 2], scores) == (3 in best)
    assert not keep.is_among_the_best(4, [1, 2], scores)  # it has no score


@given(
    st.sets(st.integers(1, 500)),
    st.integers(0, 9),
    st.none() | st.integers(1, 200),
    st.integers(0, 5),
    st.dictionaries(st.integers(1, 500), st.builds(Score, st.floats(), st.floats())),
    st.sampled_from(list(BestBy)),
)
def test_whatever_the_rules_the_two_newest_stay_and_it_is_settled(
    present: set[int], last: int, every: int | None, best: int, scores: dict[int, Score], by: BestBy
) -> None:
    keep = Keep(last, every, best, by)
    kept = keep.steps(present, scores)
    assert kept <= present
    assert set(sorted(present)[-2:]) <= kept
    assert len(kept) >= min(len(present), last)
    assert keep.steps(kept, scores) == kept  # nothing more goes when nothing more comes


def test_scores_that_cant_be_read_are_said_and_harm_nothing(tmp_path: Path) -> None:
    store, warnings = Store(tmp_path), list[str]()
    train(store, Keep(2, best=1), 50, 10, {10: Score(0.1, 0)})
    assert steps(store) == [50, 40, 10]
    for text in ("", "[]", '{"x": 1}', '{"10": {"loss": 1}}', "\xff"):
        (tmp_path / SCORES).write_text(text, encoding="latin-1")
        assert store.scores(warnings.append) == {}
    assert len(warnings) == 5
    assert "no checkpoint is kept for its score" in warnings[0]


def test_scores_that_cant_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    warnings: list[str] = []
    monkeypatch.setattr(os, "replace", full)
    Store(tmp_path).add_score(1, Score(1, 1), warnings.append)
    assert warnings == [f"{tmp_path / SCORES}: can't be written: No space left on device"]
    assert os.listdir(tmp_path) == []
