"""Host lists that people met on real clusters (tests/corpus/slurm), read by Slurm itself and without it."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from clusterrun.launch.slurm_steps import expand_host_list

CORPUS = Path(__file__).parents[1] / "corpus" / "slurm" / "nodelists.tsv"


def _cases() -> dict[str, list[str]]:
    with CORPUS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    cases = {}
    for row in rows:
        padded = row["expanded"] == "(001..102)"
        nodes = [f"node{i:03}" for i in range(1, 103)] if padded else row["expanded"].split()
        assert (nodes[0], len(nodes)) == (row["expanded_first"], int(row["expanded_count"])), row
        cases[row["nodelist"]] = nodes
    return cases


CASES = _cases()


def test_corpus_is_whole() -> None:
    assert len(CASES) == 18


@pytest.mark.slurm
@pytest.mark.skipif(shutil.which("scontrol") is None, reason="no Slurm client on this machine")
@pytest.mark.parametrize("node_list", CASES)
def test_by_slurm(node_list: str) -> None:
    assert expand_host_list(node_list) == CASES[node_list]


@pytest.mark.parametrize("node_list", CASES)
def test_without_slurm(node_list: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert expand_host_list(node_list) == CASES[node_list]
