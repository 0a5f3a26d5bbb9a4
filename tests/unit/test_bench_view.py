"""The tables of a bench, from rows as workers write them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from clusterrun.config.compose import compose
from clusterrun.config.schema import ClusterConfig, InterconnectConfig
from clusterrun.errors import ConfigError
from clusterrun.ledger import Ending, Ledger
from clusterrun.measure.results import Row
from clusterrun.report import bench_plot, bench_view
from clusterrun.report.bench_expected import Expected
from clusterrun.rundir import RunDir

LAB = Expected(ClusterConfig(nodes=2, nproc_per_node=2))

BRIDGED = "a100_pcie cluster.interconnect.intra_node=nvlink_pairs cluster.interconnect.nvlinks_per_pair=12"


def written(tmp_path: Path, rows: list[Row], *, per_node: int = 2, nodes: int = 2) -> RunDir:
    run = RunDir.create(tmp_path, "bench")
    ledger = Ledger(run.ledger)
    attempt = run.attempt(ledger.start(reason="first start", job_id="1", saved_before=None))
    attempt.make()
    for rank in range(nodes * per_node):
        node = f"c{rank // per_node + 1}"
        records = [{"kind": "start", "rank": rank, "node": node, "device": "cpu"}]
        records += [{"kind": "measured", "rank": rank, **row.as_json()} for row in rows if row.ranks[0] == rank]
        attempt.event_file(node, rank).write_text("".join(json.dumps(record) + "\n" for record in records))
    ledger.end(attempt.number, Ending.done, saved_after=None, exit_code=0)
    return run


def shown(run: RunDir, expected: Expected = LAB) -> str:
    out = io.StringIO()
    bench_view.show(bench_view.read(run), Console(file=out, width=120), expected)
    return out.getvalue()


def row(phase: str, ranks: tuple[int, ...], size: int, seconds: float, wrong: int | None = 0) -> Row:
    return Row(phase, ranks, "all_reduce", size, seconds, seconds, 20, wrong)


def test_a_line_is_fitted_and_the_slowest_node_named(tmp_path: Path) -> None:
    rows = [row("all", (0, 1, 2, 3), size, 1e-3 + size * 1e-8) for size in (2**20, 2**24)]
    rows += [row("in_node", (0, 1), 2**20, 1e-3), row("in_node", (2, 3), 2**20, 5e-3)]
    said = shown(written(tmp_path, rows))
    assert "all_reduce, all 4 ranks on c1, c2" in said
    assert "latency 1 ms, busbw of large sizes 0.15 GB/s" in said
    in_node = said[said.index("the 2 ranks of a node, 2 nodes at once") :]
    assert "c2 0.21" in in_node


def test_pairs_are_a_matrix_per_node(tmp_path: Path) -> None:
    pairs = [(0, 1), (0, 2), (1, 2)]
    rows = [row("pairs", pair, 2**20, (i + 1) * 1e-3) for i, pair in enumerate(pairs)]
    said = shown(written(tmp_path, rows, per_node=3, nodes=1))
    assert "pairs of c1, busbw GB/s at 1 MiB" in said
    lines = [line.split() for line in said.splitlines()]
    assert ["0", "-", "1.05", "0.524"] in lines
    assert ["2", "0.524", "0.35", "-"] in lines


def test_wrong_results_and_unchecked_ones_are_said(tmp_path: Path) -> None:
    said = shown(written(tmp_path, [row("all", (0, 1), 2**20, 1e-3, wrong=7)]))
    assert "WRONG RESULTS: 7 elements" in said
    other = shown(written(tmp_path / "other", [row("all", (0, 1), 2**20, 1e-3, wrong=None)]))
    assert "not checked" in other
    assert "WRONG" not in other


def test_a_line_without_slope_has_no_rate(tmp_path: Path) -> None:
    said = shown(written(tmp_path, [row("all", (0, 1), 2**10, 2e-3), row("all", (0, 1), 2**11, 1e-3)]))
    assert "larger sizes take no longer" in said


def test_nothing_measured(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "bench")
    assert bench_view.as_json(bench_view.read(run), LAB)["series"] == []


def test_the_limit_of_the_declared_wires(tmp_path: Path) -> None:
    """Two NICs of 8 Gbit/s carry 2 GB/s each way out of a node; inside of one they are no limit."""
    wires = InterconnectConfig(nic_gbit_per_s=8, nics_per_node=2)
    expected = Expected(ClusterConfig(nodes=2, nproc_per_node=2, interconnect=wires))
    run = written(tmp_path, [row("all", (0, 1, 2, 3), 2**20, 2**20 * 1.5e-9), row("in_node", (0, 1), 2**20, 1e-3)])
    said = shown(run, expected)
    assert "of limit" in said[: said.index("of a node")]
    assert "50%" in said
    assert "of limit" not in said[said.index("of a node") :]
    found = bench_view.as_json(bench_view.read(run), expected)["series"]
    assert [series["limit_busbw"] for series in found] == [2e9, None]


def test_a_plot(tmp_path: Path) -> None:
    rows = [row("all", (0, 1, 2, 3), size, 1e-3 + size * 1e-8) for size in (2**20, 2**24)]
    measured = bench_view.read(written(tmp_path, [*rows, row("pairs", (0, 1), 2**20, 1e-3)]))
    path = tmp_path / "bench.svg"
    bench_plot.check(path)
    bench_plot.write_plot(measured, LAB, path)
    assert "<svg" in path.read_text()
    for wrong in ("bench.txt", "no/such/place.svg"):
        with pytest.raises(ConfigError, match="--plot"):
            bench_plot.check(tmp_path / wrong)


@pytest.mark.parametrize(
    ("cluster", "ranks", "gb_s"),
    [
        ("a100_nvswitch", tuple(range(8)), 300),
        ("a100_nvswitch", (0, 5), 300),
        ("h100_nvswitch_ib", tuple(range(8)), 450),
        ("h100_nvswitch_ib", tuple(range(16)), 400),
        ("a100_pcie", (0, 1), 31.5),
        (BRIDGED, (0, 1), 300),
        (BRIDGED, (0, 1, 2, 3), 31.5),
        ("l40s_pcie", (0, 1), 31.5),
        ("lab", (0, 1), None),
    ],
)
def test_the_limits_of_declared_clusters(cluster: str, ranks: tuple[int, ...], gb_s: float | None) -> None:
    found = Expected(compose([f"+cluster={cluster.split()[0]}", *cluster.split()[1:]]).cluster).limit(ranks)
    assert found == (None if gb_s is None else pytest.approx(gb_s * 1e9))


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    expected = Expected(compose(["+cluster=a100_nvswitch"]).cluster)
    limit, seconds = expected.limit(range(8)), expected.seconds("all_reduce", range(8), 2**33)
    assert limit is not None
    assert seconds is not None
    assert 0.7 < 2**33 / seconds * 2 * 7 / 8 / limit < 1, "a large all-reduce comes near the wire's rate"
    between = expected.seconds("all_reduce", (0, 8), 2**30)
    assert between is not None
    assert expected.seconds("all_reduce", (0, 1, 8), 2**30) is None
    assert LAB.seconds("all_reduce", (0, 1), 2**20) == pytest.approx(2**20 / 1.2e9, rel=0.6)  # the loopback
    run = written(tmp_path, [row("all", tuple(range(8)), 2**30, 1e-2)], per_node=8, nodes=1)
    assert "predicted" in shown(run, expected)
    (series,) = bench_view.as_json(bench_view.read(run), expected)["series"]
    assert series["rows"][0]["predicted_s"] == expected.seconds("all_reduce", range(8), 2**30)
