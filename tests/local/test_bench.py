"""``clusterrun bench`` on this machine: real torchrun, real Gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import clusterrun

FEW = ["bench.iterations=3", "bench.warmup=1"]


def test_every_collective_in_every_group(tmp_path: Path) -> None:
    code, said = clusterrun(
        tmp_path, "bench", "collective=all", "sizes=4K,256K", "groups=all,in_node,between_nodes,pairs", "--json", *FEW
    )
    assert code == 0, said
    found = json.loads(said[said.index("{") :])
    assert found["nodes"] == ["node0", "node1"]
    seen = {(s["phase"], s["collective"], tuple(s["ranks"])) for s in found["series"]}
    expected = {
        "all": [(0, 1, 2, 3)],
        "in_node": [(0, 1), (2, 3)],
        "between_nodes": [(0, 2)],
        "pairs": [(0, 1), (2, 3)],
    }
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"):
        for phase, members in expected.items():
            for ranks in members:
                assert (phase, collective, ranks) in seen
    rows = [row for series in found["series"] for row in series["rows"]]
    assert all(row["wrong"] == 0 and row["seconds"] >= row["best_s"] > 0 and row["iterations"] >= 3 for row in rows)
    assert {row["bytes"] for row in rows} == {4096, 2**18}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("collective=allreduce", ("bench.collective=allreduce", "Did you mean 'all_reduce'")),
        ("sizes=much", ("bench.sizes=much", "64K")),
        ("groups=pair", ("bench.groups=pair", "Did you mean 'pairs'")),
        ("tool=iperf", ("bench.tool=iperf", "nccl-tests")),
        ("bench.iterations=0", ("bench.iterations=0", "from 3")),
        ("groups=pairs cluster.nproc_per_node=1", ("bench.groups", "nothing to measure")),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, argument: str, words: tuple[str, ...]) -> None:
    code, said = clusterrun(tmp_path, "bench", *argument.split())
    assert code == 2
    assert len(said.splitlines()) == 1
    assert all(word in said for word in words), said
