"""Every pasted `nvidia-smi topo -m` of tests/corpus/topo against the right answers in its INDEX.tsv."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from clusterrun.report import topology_table
from clusterrun.topology.document import document
from clusterrun.topology.model import TopologyError
from clusterrun.topology.text import parse_topologies

CORPUS = Path(__file__).parents[1] / "corpus" / "topo"


def _cases() -> list[dict[str, str]]:
    with (CORPUS / "INDEX.tsv").open(encoding="utf-8", newline="") as index:
        return list(csv.DictReader(index, delimiter="\t", quoting=csv.QUOTE_NONE))


CASES = {case["file"]: case for case in _cases()}
GOOD = [name for name, case in CASES.items() if case["expect"] != "reject"]
BAD = [name for name, case in CASES.items() if case["expect"] == "reject"]


def test_every_file_has_an_answer() -> None:
    assert {path.name for path in CORPUS.glob("*.txt")} == set(CASES)
    assert len(CASES) >= 58


@pytest.mark.parametrize("name", GOOD)
def test_right_answer(name: str) -> None:
    case = CASES[name]
    machines = document(parse_topologies((CORPUS / name).read_bytes()))["machines"]
    assert len(machines) == 1
    got = machines[0]
    numa = "" if case["numa_list"] in ("-", "N/A") else case["numa_list"]
    assert got["gpus"] == int(case["n_gpus"])
    assert got["class"] == case["expected_class"]
    assert (got["worst_link"] or "-", got["best_link"] or "-") == (case["worst_gpu_link"], case["best_gpu_link"])
    assert got["nics"] == int(case["n_nics"])
    assert ",".join(map(str, got["numa_nodes"])) == numa
    assert got["complete"] is (case["expect"] == "ok")
    assert bool(got["missing"]) is (case["expect"] == "incomplete")
    assert len(got["links"]) == got["gpus"]
    assert all(row[at] == "X" and len(row) == got["gpus"] for at, row in enumerate(got["links"]))


@pytest.mark.parametrize("name", BAD)
def test_not_a_topology(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TopologyError, match="not a topology"):
        parse_topologies((CORPUS / name).read_bytes())
    assert topology_table.main([str(CORPUS / name)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("name", GOOD)
def test_recorded_and_read_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "snapshot.json"
    assert topology_table.main([str(CORPUS / name), "--json", "--record", str(record)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert topology_table.main([str(record), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
