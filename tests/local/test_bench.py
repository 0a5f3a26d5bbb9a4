"""``clusterrun bench`` on this machine: real torchrun, real Gloo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import clusterrun

FEW = ["bench.iterations=3", "bench.warmup=1", "bench.seconds_per_size=0.05"]


def test_every_collective_in_every_group(tmp_path: Path) -> None:
    code, said = clusterrun(
        tmp_path, "bench", "collective=all", "sizes=16K", "groups=all,in_node,between_nodes,pairs", "--json", *FEW
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
    assert {row["bytes"] for row in rows} == {2**14}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("collective=allreduce", ("bench.collective=allreduce", "Did you mean 'all_reduce'")),
        ("sizes=much", ("bench.sizes=much", "64K")),
        ("groups=pair", ("bench.groups=pair", "Did you mean 'pairs'")),
        ("tool=iperf", ("bench.tool=iperf", "nccl-tests")),
        ("bench.iterations=0", ("bench.iterations=0", "from 3")),
        ("--plot=bench.txt", ("--plot bench.txt", ".png or .svg")),
        ("groups=pairs cluster.nproc_per_node=1", ("bench.groups", "nothing to measure")),
    ],
)
def test_bad_input_is_one_line(clusterrun_here: Callable[..., Any], argument: str, words: tuple[str, ...]) -> None:
    ended = clusterrun_here("bench", *argument.split())
    assert ended.code == 2
    assert len(ended.stderr.splitlines()) == 1
    assert all(word in ended.stderr for word in words), ended.stderr
