"""Measuring on links of known rate: the lab's hosts, their cables shaped by tc."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterrun.ledger import Ending
from support import attempts, clusterrun, events, run_dir

pytestmark = pytest.mark.slurm

TWO = ["+cluster=lab", "cluster.nodes=2", "cluster.nproc_per_node=1", 'cluster.slurm.nodelist="c[1-2]"']
Slow = Callable[[str, str], None]


@pytest.fixture
def slow(lab: Path) -> Iterator[Slow]:
    """Shape the cable of a host; all are as before afterwards."""
    slowed: list[str] = []

    def shape(host: str, rate: str) -> None:
        slowed.append(host)
        subprocess.run([sys.executable, lab, "fault", "slow", host, "--rate", rate], check=True, timeout=60)

    yield shape
    for host in slowed:
        subprocess.run([sys.executable, lab, "fault", "unslow", host], check=True, timeout=60)


def bench(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    code, said = clusterrun(tmp_path, "bench", "--json", *TWO, *arguments)
    assert code == 0, said
    series: list[dict[str, Any]] = json.loads(said[said.index("{\n") :])["series"]
    return series


def check_rate(series: dict[str, Any], mbit: int) -> None:
    """Within 10 %. Of what goes over the cable 4.4 % are headers; the rest of the difference is acknowledgements."""
    wire = mbit * 1e6 / 8
    row = series["rows"][-1]
    assert row["busbw"] == pytest.approx(wire, rel=0.10)
    assert 1 / series["beta_s_per_byte"] == pytest.approx(wire, rel=0.10)  # two ranks: busbw is algbw
    assert row["wrong"] == 0


def test_the_bench_finds_the_rate_of_a_link_of_1_gbit(tmp_path: Path, slow: Slow) -> None:
    slow("c2", "1gbit")
    (series,) = bench(tmp_path, "sizes=1M,4M", "bench.iterations=8", "cluster.interconnect.nic_gbit_per_s=1")
    check_rate(series, 1000)
    assert series["limit_busbw"] == pytest.approx(1e9 / 8)


def test_a_slow_node_is_named_and_the_spare_trains(tmp_path: Path, slow: Slow) -> None:
    slow("c2", "100mbit")
    wanted = ["+cluster=lab", "cluster.nodes=2", "cluster.spare_nodes=1", "cluster.nproc_per_node=1"]
    wanted += ['cluster.slurm.nodelist="c[1-3]"', "preflight=full", "preflight.slow_timeout_s=30"]
    code, said = clusterrun(tmp_path, *wanted, "train=ddp_linear", "train.max_steps=5", "run_id=slow", "wait=true")
    assert code == 0, said
    (attempt,) = attempts(tmp_path, "slow")
    assert attempt.ending is Ending.done
    assert attempt.nodes == ("c1", "c3")
    refused = {
        node: json.loads(run_dir(tmp_path, "slow").attempt(1).report(node).read_text())["refused"]
        for node in ("c1", "c2", "c3")
    }
    assert refused["c1"] is None
    assert refused["c3"] is None
    assert "between_nodes: slow with everybody" in refused["c2"]
    code, listed = clusterrun(tmp_path, "nodes", "+cluster=lab", "--json")
    assert [entry["node"] for entry in json.loads(listed)] == ["c2"]


def test_the_rate_of_a_link_of_100_mbit_and_the_step_time_it_predicts(tmp_path: Path, slow: Slow) -> None:
    """Gradients of 2.7 MB over a slow link: communication and step within 20 % of what the bench's line says, and of
    what the plan said without any measurement. Cast to fp16 on the way they take half the time."""
    slow("c2", "100mbit")
    (series,) = bench(tmp_path, "sizes=256K,1M,2M", "bench.iterations=5")
    check_rate(series, 100)
    train = ["train=ddp_mlp", "train.task_args={hidden: 512}", "train.max_steps=20", "train.log_every_steps=1"]
    train += ["data=mnist5k", "cluster.interconnect.nic_gbit_per_s=0.1", "wait=true"]
    code, said = clusterrun(tmp_path, *TWO, *train, "run_id=step")
    assert code == 0, said
    (start,) = events(tmp_path, "step", "start")
    steps = events(tmp_path, "step", "step")[3:]
    predicted = series["alpha_s"] + series["beta_s_per_byte"] * 4 * start["parameters"]
    measured = statistics.median(step["step_time_s"] for step in steps)
    communication = statistics.median(step["comm_time_s"] for step in steps if step["comm_time_s"])
    assert communication == pytest.approx(predicted, rel=0.2)
    assert measured == pytest.approx(predicted, rel=0.2)  # computing takes a few ms of it
    planned = json.loads(run_dir(tmp_path, "step").plan.read_text())["prediction"]
    assert measured == pytest.approx(planned["step_s"], rel=0.2)
    assert planned["bottleneck"] == "0.1 Gbit/s over TCP"
    code, said = clusterrun(tmp_path, *TWO, *train, "run_id=packed", "train.grad_compression=fp16")
    assert code == 0, said
    packed = statistics.median(step["step_time_s"] for step in events(tmp_path, "packed", "step")[3:])
    planned = json.loads(run_dir(tmp_path, "packed").plan.read_text())["prediction"]
    assert packed == pytest.approx(planned["step_s"], rel=0.2)
    assert 0.4 * measured < packed < 0.6 * measured
    code, said = clusterrun(tmp_path, "report", "step")
    lines = {line[:21].strip(): line for line in said.splitlines()}
    assert "0.1 Gbit/s ethernet" in lines["between nodes"]
    assert lines["step"].count(" ms") == 2, "predicted and measured"
