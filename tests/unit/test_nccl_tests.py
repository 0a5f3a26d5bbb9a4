"""Tables of nccl-tests: real ones against the answers of a careful reader, and made ones for what they lack."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterrun.measure.nccl_tests import Status, Table, read
from conftest import Ended

CORPUS = Path(__file__).parents[1] / "corpus" / "nccl_tests"
CASES = {row["file"]: row for row in csv.DictReader((CORPUS / "INDEX.tsv").open(), delimiter="\t")}
_GROUP = "     time   algbw   busbw #wrong"
HEADER = f"#       size         count      type   redop    root{_GROUP}{_GROUP}\n"
BANNER = (
    "# nThread 1 nGpus 1 minBytes 8 maxBytes 16 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1\n"
)
ROW = "     8        2     float     sum      -1    22.84    0.10    0.15      0    22.38    0.10    0.15      0\n"
LAST = ROW.replace("  8  ", " 16  ", 1)
FOOTER = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 0.15\n"


def one(text: str, expected: str = "all_reduce") -> Table:
    (table,) = read(text, expected)
    return table


def _number(text: str) -> float | None:
    return None if text == "-" else float(text)


@pytest.mark.parametrize("name", CASES)
def test_corpus(name: str) -> None:
    case = CASES[name]
    table = one((CORPUS / name).read_text())
    word = case["expect"].split("_")[0]
    # Hand-trimmed is an all-gather too: none of the statuses for a table that is as asked fits it.
    status = {"ok": "ok", "wrong": case["expect"], "truncated": "truncated", "hand": "wrong_collective"}[word]
    got = table.as_json()
    assert got["status"] == status
    assert got["collective"] == case["collective"].split()[0]
    assert got["peak_busbw"] == _number(case["peak_busbw_oop"])
    assert got["peak_size"] == _number(case["size_oop"])
    assert got["peak_busbw_in_place"] == _number(case["peak_busbw_ip"])
    assert got["peak_size_in_place"] == _number(case["size_ip"])
    assert got["avg_busbw"] == _number(case["avg_busbw_reported"])
    if case["implied_ranks"] != "-":
        assert got["ranks"] == int(case["implied_ranks"])
    if got["nodes"] is not None:
        assert got["nodes"] == int(case["nodes"])


def test_corpus_is_whole() -> None:
    assert {path.name for path in CORPUS.glob("*.txt")} == set(CASES)


@pytest.mark.parametrize(
    "line",
    [
        "h1: Test NCCL failure common.cu:1204 'unhandled cuda error (run with NCCL_DEBUG=INFO for details) / '",
        " .. h1 pid 757466: Test failure common.cu:915",
        "NCCL failure all_reduce.cu:95 'unhandled cuda error'",
        "srun: error: h1: tasks 0-7: Segmentation fault",
        "mpirun noticed that process rank 3 with PID 0 on node h1 exited on signal 9 (Killed).",
        "slurmstepd: error: *** STEP 4.0 ON h1 CANCELLED AT 2025-01-01T00:00:00 DUE TO TIME LIMIT ***",
    ],
)
def test_a_crash_after_good_rows_is_a_crash(line: str) -> None:
    for text in (
        BANNER + HEADER + ROW + line,
        BANNER + HEADER + ROW + LAST + line + "\n" + FOOTER,
        HEADER + line,
        line,
    ):
        assert one(text).status is Status.CRASHED


def test_a_retry_after_a_crash_counts_by_itself() -> None:
    first, second = read(HEADER + ROW + "x: Test failure common.cu:915\n" + BANNER + HEADER + ROW + LAST + FOOTER)
    assert (first.status, second.status) == (Status.CRASHED, Status.OK)
    assert (len(first.rows), len(second.rows), second.avg_busbw) == (1, 2, 0.15)


def test_a_warning_is_no_crash() -> None:
    assert one(HEADER + "h:1:2 [0] NCCL WARN Missing iommu=pt\n" + ROW + FOOTER).status is Status.OK


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (("22.38    0.10    0.15      0", "22.38    0.10    0.15      6"), Status.WRONG),
        (("22.38    0.10    0.15      0", "22.38    0.10    0.15  1e+06"), Status.WRONG),
        (("22.38    0.10    0.15      0", "22.38    0.10    0.15    nan"), Status.WRONG),
        (("22.38    0.10    0.15      0", "22.38    0.10    0.15    N/A"), Status.OK),
    ],
)
def test_wrong_in_one_cell(change: tuple[str, str], status: Status) -> None:
    table = one(HEADER + ROW.replace(*change) + FOOTER.replace("0 OK", "0 OK"))
    assert table.status is status


def test_wrong_in_the_footer_alone() -> None:
    assert one(HEADER + ROW + FOOTER.replace("0 OK", "3 FAILED")).status is Status.WRONG


@pytest.mark.parametrize(("cell", "status"), [("4e-07", Status.OK), ("1e+00", Status.WRONG), ("4e-07*", Status.WRONG)])
def test_the_error_column_of_old_versions(cell: str, status: Status) -> None:
    header = (
        "#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error\n"
    )
    row = (
        f"     1048576        262144   float     sum    35.91   29.20   29.20  4e-07    35.10   29.87   29.87  {cell}\n"
    )
    table = one(header + row)
    assert (table.status, table.rows[0].size, table.rows[0].out_of_place.busbw) == (status, 1048576, 29.2)


def test_columns_of_the_per_iteration_report() -> None:
    head = HEADER.rstrip().replace("#wrong", "#wrong i_min i_max i_p99 i_cv%") + " timestamp\n"
    row = ROW.rstrip().replace("0.15      0", "0.15      0   20.1  30.2  29.9  4.5") + "  2025-11-02 10:11:12\n"
    table = one(head + row + FOOTER)
    assert (table.status, table.rows[0].in_place) == (Status.OK, table.rows[0].in_place)
    assert table.rows[0].in_place is not None
    assert table.rows[0].in_place.time_us == 22.38


def test_truncated_by_its_own_banner() -> None:
    assert one(BANNER + HEADER + ROW).status is Status.TRUNCATED
    assert one(BANNER + HEADER + ROW + LAST).status is Status.OK
    lowered = BANNER + "# Reducing maxBytes to 8 due to memory limitation\n" + HEADER + ROW
    assert one(lowered).status is Status.OK


def test_another_writer_in_the_middle_of_a_row() -> None:
    cut = ROW.index("22.84")
    broken = ROW[:cut].rstrip() + "h1:12:34 [0] NCCL INFO Connected all rings\n" + ROW[cut:]
    table = one(HEADER + broken + LAST + FOOTER)
    assert [row.size for row in table.rows] == [8, 16]
    assert table.status is Status.OK


@pytest.mark.parametrize(
    "prefix", ["3: ", " 0: ", "[1,0]<stdout>:", "[1,0]<stdout>: ", "[pod/launcher/x] ", "\x1b[32m", "> "]
)
def test_prefixes(prefix: str) -> None:
    text = "".join(prefix + line for line in (BANNER + HEADER + ROW + LAST + FOOTER).splitlines(keepends=True))
    table = one(text)
    assert (table.status, len(table.rows), table.avg_busbw) == (Status.OK, 2, 0.15)


def test_each_rank_printing_its_own_table() -> None:
    """A build without MPI started by srun -l: one rank each, no table over all of them."""
    row = ROW.replace("0.15", "0.00")
    lines = [f"{rank}: {line}" for line in (HEADER, row, FOOTER.splitlines()[0] + "\n") for rank in range(3)]
    assert [(table.status, len(table.rows)) for table in read("".join(lines))] == [(Status.OK, 1)] * 3


@pytest.mark.parametrize(
    ("program", "op", "busbw", "expected"),
    [
        ("all_gather_perf", "none", "0.05", "all_gather"),
        ("reduce_scatter_perf", "sum", "0.05", "reduce_scatter"),
        ("sendrecv_perf", "sum", "0.10", "sendrecv"),
    ],
)
def test_other_collectives(program: str, op: str, busbw: str, expected: str) -> None:
    text = f"# Collective test starting: {program}\n" + HEADER + ROW.replace("sum", op).replace("0.15", busbw) + FOOTER
    assert (one(text).status, one(text).collective) == (Status.WRONG_COLLECTIVE, expected)
    assert one(text, expected).status is Status.OK


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_a_cut_file_is_never_better_than_the_whole(name: str, data: st.DataObject) -> None:
    """Cut anywhere, even in a number: no crash of ours, and no figure above the whole table's."""
    text = (CORPUS / name).read_text()
    whole = one(text)
    at = data.draw(st.integers(0, len(text)))
    for part in read(text[:at]):
        peak = part.peak
        if peak is not None and whole.peak is not None:
            assert peak.out_of_place.busbw <= whole.peak.out_of_place.busbw


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=300)
    | st.lists(st.sampled_from([HEADER, ROW, LAST, FOOTER, BANNER, "131072\n", "x\n"])).map("".join)
)
def test_anything_is_read(text: str) -> None:
    tables = read(text)
    assert tables
    for table in tables:
        assert table.rows or table.status in (Status.NO_ROWS, Status.CRASHED)
        json.dumps(table.as_json(), allow_nan=False)


class TestCommand:
    def test_json(self, clusterrun_here: Callable[..., Ended]) -> None:
        ended = clusterrun_here("bench", "--read", str(CORPUS / "006-oci-2xA100-nodelist-range.txt"), "--json")
        expected: dict[str, Any] = {
            "collective": "all_reduce",
            "ranks": 16,
            "status": "ok",
            "peak_busbw": 189.6,
            "peak_size": 8589934592,
            "avg_busbw": None,
        }
        (table,) = json.loads(ended.stdout)["tables"]
        assert (ended.code, ended.stderr) == (0, "")
        assert table.items() >= expected.items()

    def test_text_says_what_is_wrong(self, clusterrun_here: Callable[..., Ended]) -> None:
        ended = clusterrun_here("bench", "--read", str(CORPUS / "009-3x3090-roce-all-wrong-stray-line.txt"))
        assert ended.code == 0
        assert "WRONG RESULTS, figures are not to be used" in ended.stdout
        assert "162 values out of bounds" in ended.stdout

    def test_no_such_file(self, clusterrun_here: Callable[..., Ended]) -> None:
        ended = clusterrun_here("bench", "--read", "nowhere.txt")
        assert ended.code == 2
        assert ended.stderr.startswith("clusterrun: nowhere.txt: No such file")


class TestComparedWithTheHardware:
    def test_in_a_node_the_table_says_enough(self, clusterrun_here: Callable[..., Ended]) -> None:
        ended = clusterrun_here("bench", "--read", str(CORPUS / "014-8xV100-single-size-row.txt"), "--json")
        (table,) = json.loads(ended.stdout)["tables"]
        assert table["expected_busbw"] == pytest.approx(table["peak_busbw"], rel=0.15)
        assert table["share_of_expected"] == pytest.approx(table["peak_busbw"] / table["expected_busbw"])

    def test_between_nodes_the_network_must_be_given(self, clusterrun_here: Callable[..., Ended]) -> None:
        file = str(CORPUS / "006-oci-2xA100-nodelist-range.txt")
        assert "give cluster=NAME" in clusterrun_here("bench", "--read", file).stdout
        given = ("cluster=a100_nvswitch", "cluster.interconnect.inter_node=roce")
        full = clusterrun_here("bench", "--read", file, *given, "cluster.interconnect.nics_per_node=8")
        assert "as expected" in full.stdout
        more = clusterrun_here("bench", "--read", file, *given, "cluster.interconnect.nics_per_node=16", "train=gpt")
        assert "as expected" in more.stdout  # the wiring inside the node decides then
        slow = clusterrun_here("bench", "--read", file, "cluster=h100_nvswitch_ib")
        assert "LOW: " in slow.stdout  # 16 H100 would reach more than this table

    def test_wrong_results_are_not_compared(self, clusterrun_here: Callable[..., Ended]) -> None:
        file = str(CORPUS / "009-3x3090-roce-all-wrong-stray-line.txt")
        assert (
            json.loads(clusterrun_here("bench", "--read", file, "--json").stdout)["tables"][0]["expected_busbw"] is None
        )
