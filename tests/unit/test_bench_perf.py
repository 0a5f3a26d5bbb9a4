"""``bench.tool=nccl-tests``: the program is run as it is found, and only a table that can be trusted counts.

The program is a script that prints real tables (tests/corpus/nccl_tests): no GPU here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.config import frozen
from clusterrun.config.schema import BenchConfig, ClusterConfig, RunConfig
from clusterrun.errors import ClusterrunError, CommandError, ConfigError
from clusterrun.measure import perf
from clusterrun.report import bench_view
from clusterrun.rundir import RunDir, read_json_lines

CORPUS = Path(__file__).parents[1] / "corpus" / "nccl_tests"
GOOD = CORPUS / "014-8xV100-single-size-row.txt"


def config(**bench: object) -> RunConfig:
    settings = BenchConfig(tool="nccl-tests", sizes=["1G"], **bench)  # type: ignore[arg-type]
    return RunConfig(cluster=ClusterConfig(nproc_per_node=8, nodes=2), bench=settings)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place in PATH; what a script there was called with ends up beside it."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def install(place: Path, shown: Path, name: str = "all_reduce_perf", code: int = 0) -> None:
    script = place / name
    script.write_text(f'#!/bin/sh\necho "$@" > {place}/called\ncat {shown}\nexit {code}\n')
    script.chmod(0o755)


def test_a_table_becomes_rows(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(program, GOOD)
    (row,) = perf.measure(config(iterations=7, warmup=2), tuple(range(8, 16)))
    assert (row.phase, row.ranks, row.bytes, row.wrong) == ("in_node", tuple(range(8, 16)), 2**30, 0)
    assert row.busbw / 1e9 == pytest.approx(135.5, rel=1e-3)
    assert (program / "called").read_text() == "-b 1073741824 -e 1073741824 -f 2 -g 8 -w 2 -n 7 -c 1\n"
    assert "Tesla V100" in capsys.readouterr().out, "the whole output is in the log"


def test_without_the_program(program: Path) -> None:
    with pytest.raises(ConfigError, match=r"alltoall_perf: not in PATH .* bench\.tool=torch"):
        perf.measure(config(collective="all_to_all"), (0, 1))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("009-3x3090-roce-all-wrong-stray-line.txt", "wrong"),
        ("025-2xDGXspark-gb10-truncated.txt", "truncated"),
        ("023-decoy-alltoall-single-5090.txt", "wrong collective"),
        ("006-oci-2xA100-nodelist-range.txt", "measured 16 GPUs, 8 were asked for"),
    ],
)
def test_a_table_that_can_not_be_trusted_is_a_failure(program: Path, table: str, words: str) -> None:
    install(program, CORPUS / table)
    with pytest.raises(ClusterrunError, match=words):
        perf.measure(config(), tuple(range(8)))


def test_a_failed_program_is_a_failure(program: Path) -> None:
    install(program, GOOD, code=3)
    with pytest.raises(CommandError, match="exit 3"):
        perf.measure(config(), tuple(range(8)))


def test_as_the_step_runs_it(program: Path) -> None:
    install(program, GOOD)
    run = RunDir.create(program, "bench")
    run.config.write_text(frozen.to_yaml(config()))
    attempt = run.attempt(1)
    attempt.make()
    argv = [sys.executable, "-m", "clusterrun.measure.perf", f"--run-dir={run.root}", "--attempt=1"]
    env = {**os.environ, "RANK": "1", "CLUSTERRUN_NODE": "c2"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    start, row = read_json_lines(attempt.event_file("c2", 1))
    assert (start["node"], start["ranks"]) == ("c2", list(range(8, 16)))
    assert row["bytes"] == 2**30
    run.ledger.write_text(json.dumps({"attempt": 1, "event": "start", "started": 0, "reason": "", "job_id": ""}) + "\n")
    assert bench_view.read(run).where(range(8, 16)) == "c2"
