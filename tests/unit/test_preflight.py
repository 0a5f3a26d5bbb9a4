"""Preflight: every check passes, fails, and says UNKNOWN where it could not be made; the rule chooses the nodes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun import frames, network
from clusterrun.config.checks import CHECKS
from clusterrun.config.schema import Accelerator, ClusterConfig, GpuRequest, PreflightConfig, SlurmConfig
from clusterrun.preflight import probe
from clusterrun.preflight.checks import ALL, basic, check_all
from clusterrun.preflight.decide import decide
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import FRAME, Finding, NodeReport, Verdict
from clusterrun.rundir import RunDir

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
GPUS = ClusterConfig(nodes=2, gpus_per_node=8, nproc_per_node=8, accelerator=Accelerator.cuda)
CPUS = ClusterConfig(nodes=2, nproc_per_node=2)
GOOD = NodeReport(
    node="c1",
    host="c1",
    time=105.0,
    python="3.11.2",
    executable="/venv/bin/python",
    packages={"clusterrun": "0.1.0", "torch": "2.13.0"},
    visible_gpus=8,
    nvml_gpus=8,
    nvml_problem="",
    cpus=64,
    address="10.0.0.1",
    address_problem="",
    port=21_000,
    run_dir_problem="",
)


def two(
    second: dict[str, Any] | None = None, cluster: ClusterConfig = GPUS, first: dict[str, Any] | None = None
) -> Evidence:
    """Nodes c1 and c2, changed as said."""
    one = dataclasses.replace(GOOD, **(first or {}))
    other = dataclasses.replace(GOOD, **{"node": "c2", "host": "c2", "address": "10.0.0.2", **(second or {})})
    return Evidence(("c1", "c2"), {"c1": one, "c2": other}, cluster, PreflightConfig(), (100.0, 110.0))


def verdicts(findings: Iterator[Finding]) -> dict[str, Verdict]:
    return {finding.node: finding.verdict for finding in findings}


def finding(found: Iterator[Finding], node: str = "c2") -> Finding:
    return next(one for one in found if one.node == node)


def test_two_good_nodes() -> None:
    findings = [f for f in check_all(two()) if f.check in basic.BASIC]
    assert [(f.check, f.node) for f in findings] == [
        (check, node)
        for check in ("answered", "versions", "gpu_count", "cpu_cores", "run_directory", "address", "clock")
        for node in ("c1", "c2")
    ]
    assert {f.verdict for f in findings} == {PASS}
    assert set(ALL) == set(CHECKS)


def test_nobody_answered() -> None:
    evidence = Evidence(("c1", "c2"), {}, GPUS, PreflightConfig(timeout_s=7), (0.0, 7.0))
    findings = check_all(evidence)
    assert [(f.check, f.node, f.verdict) for f in findings] == [("answered", "c1", FAIL), ("answered", "c2", FAIL)]
    assert "7 s" in findings[0].finding


def test_one_did_not_answer() -> None:
    evidence = dataclasses.replace(two(), reports={"c2": two().reports["c2"]})
    assert verdicts(basic.answered(evidence)) == {"c1": FAIL, "c2": PASS}
    assert {f.node for f in check_all(evidence) if f.check != "answered"} == {"c2"}


class TestVersions:
    def test_another_python(self) -> None:
        evidence = two({"python": "3.12.0"})
        evidence = dataclasses.replace(
            evidence, reports={**evidence.reports, "c3": dataclasses.replace(GOOD, node="c3")}
        )
        assert verdicts(basic.versions(evidence)) == {"c1": PASS, "c2": FAIL, "c3": PASS}
        assert finding(basic.versions(evidence)).finding == "python 3.12.0 (others: 3.11.2)"

    @pytest.mark.parametrize("packages", [{"torch": "2.6.0", "clusterrun": "0.1.0"}, {"clusterrun": "0.1.0"}])
    def test_another_package_or_none(self, packages: dict[str, str]) -> None:
        odd = finding(basic.versions(two({"packages": packages})))
        assert odd.verdict is FAIL
        assert f"torch {packages.get('torch', 'missing')} (others: 2.13.0)" in odd.finding
        assert "same environment" in odd.advice


class TestGpuCount:
    @pytest.mark.parametrize(
        ("seen", "verdict", "word"),
        [
            ({"nvml_gpus": 7}, FAIL, "7 GPUs by NVML, 8 workers"),
            ({"nvml_gpus": 0}, FAIL, "0 GPUs"),
            ({"visible_gpus": 4}, FAIL, "4 GPUs by CUDA_VISIBLE_DEVICES"),
            ({"visible_gpus": None}, PASS, "8 GPUs by NVML"),
            ({"nvml_gpus": 9, "visible_gpus": 9}, PASS, "9 GPUs"),
            ({"nvml_gpus": None, "nvml_problem": "NVML: Driver Not Loaded"}, UNKNOWN, "Driver Not Loaded"),
        ],
    )
    def test_cuda(self, seen: dict[str, Any], verdict: Verdict, word: str) -> None:
        found = finding(basic.gpu_count(two(seen)))
        assert found.verdict is verdict
        assert word in found.finding

    def test_cpu_job_that_asked_for_gpus(self) -> None:
        cluster = dataclasses.replace(CPUS, gpus_per_node=8)
        assert verdicts(basic.gpu_count(two({"visible_gpus": 1}, cluster))) == {"c1": PASS, "c2": FAIL}

    def test_more_cpu_workers_than_gpus(self) -> None:
        """No more GPUs are asked of Slurm than a node has, so no more can be missing."""
        cluster = dataclasses.replace(CPUS, gpus_per_node=8, nproc_per_node=12)
        assert verdicts(basic.gpu_count(two(None, cluster))) == {"c1": PASS, "c2": PASS}

    @pytest.mark.parametrize(
        "cluster", [CPUS, dataclasses.replace(CPUS, gpus_per_node=8, slurm=SlurmConfig(gpu_request=GpuRequest.none))]
    )
    def test_no_gpu_asked_for(self, cluster: ClusterConfig) -> None:
        assert not list(basic.gpu_count(two({"visible_gpus": 0}, cluster)))


def test_cpu_cores() -> None:
    cluster = dataclasses.replace(GPUS, cpus_per_proc=8)
    assert verdicts(basic.cpu_cores(two({"cpus": 63}, cluster))) == {"c1": PASS, "c2": WARN}
    assert finding(basic.cpu_cores(two({"cpus": 4}, cluster))).finding == "4 cores usable, 64 asked for"


def test_run_directory() -> None:
    evidence = two({"run_dir_problem": "/nfs/x: Read-only file system"})
    assert verdicts(basic.run_directory(evidence)) == {"c1": PASS, "c2": FAIL}
    assert "Read-only" in finding(basic.run_directory(evidence)).finding


class TestAddress:
    @pytest.mark.parametrize(
        ("seen", "word"),
        [
            ({"address": None, "address_problem": "interface ib0: not here"}, "ib0: not here"),
            ({"address": "127.0.1.1"}, "127.0.1.1 is loopback"),
            ({"port": None}, "no free port on 10.0.0.2"),
        ],
    )
    def test_wrong(self, seen: dict[str, Any], word: str) -> None:
        assert verdicts(basic.address(two(seen))) == {"c1": PASS, "c2": FAIL}
        assert word in finding(basic.address(two(seen))).finding

    def test_simulated_nodes_may_use_loopback(self) -> None:
        evidence = two({"host": "c1", "address": "127.0.0.1"}, first={"address": "127.0.0.1"})
        assert verdicts(basic.address(evidence)) == {"c1": PASS, "c2": PASS}


@pytest.mark.parametrize(
    ("at", "verdict"),
    [(100.0, PASS), (110.0, PASS), (114.9, PASS), (115.1, WARN), (95.1, PASS), (94.9, WARN), (0.0, WARN)],
)
def test_clock(at: float, verdict: Verdict) -> None:
    """Between the begin of the step and its end nobody can tell; beyond, 5 s are allowed."""
    assert verdicts(basic.clock(two({"time": at}))) == {"c1": PASS, "c2": verdict}


class TestDecide:
    @staticmethod
    def found(**of: Verdict) -> list[Finding]:
        return [Finding("check", node, verdict, f"it is {verdict.value}") for node, verdict in of.items()]

    def test_first_healthy_nodes_in_order(self) -> None:
        decision = decide(["c3", "c1", "c2"], self.found(c1=PASS, c2=PASS, c3=PASS), 2, PreflightConfig(strict=False))
        assert decision.chosen == ("c3", "c1")
        assert decision.bad == {}

    def test_a_spare_steps_in(self) -> None:
        decision = decide(["c1", "c2", "c3"], self.found(c1=FAIL, c2=WARN, c3=PASS), 2, PreflightConfig(strict=False))
        assert decision.chosen == ("c2", "c3")
        assert decision.bad == {"c1": "check: it is FAIL"}

    @pytest.mark.parametrize(("strict", "chosen"), [(False, ("c1", "c2")), (True, ("c1",))])
    def test_strict_makes_unknown_fatal(self, strict: bool, chosen: tuple[str, ...]) -> None:
        assert decide(["c1", "c2"], self.found(c1=PASS, c2=UNKNOWN), 2, PreflightConfig(strict=strict)).chosen == chosen

    def test_the_first_reason_is_told(self) -> None:
        findings = [Finding("a", "c1", PASS, ""), Finding("b", "c1", FAIL, "first"), Finding("c", "c1", FAIL, "second")]
        assert decide(["c1"], findings, 1, PreflightConfig(strict=False)).bad == {"c1": "b: first"}

    def test_too_few(self) -> None:
        assert decide(["c1", "c2"], self.found(c1=FAIL, c2=FAIL), 2, PreflightConfig(strict=False)).chosen == ()

    @given(st.lists(st.sampled_from(Verdict), min_size=1, max_size=8), st.integers(1, 8), st.booleans())
    def test_any(self, seen: Sequence[Verdict], wanted: int, strict: bool) -> None:
        nodes = [f"c{i}" for i in range(len(seen))]
        decision = decide(
            nodes, self.found(**dict(zip(nodes, seen, strict=True))), wanted, PreflightConfig(strict=strict)
        )
        assert len(decision.chosen) <= wanted
        assert not set(decision.chosen) & set(decision.bad)
        assert len(decision.chosen) == min(wanted, len(nodes) - len(decision.bad))
        assert sorted(decision.chosen, key=nodes.index) == list(decision.chosen)
        assert set(decision.bad) == {
            n for n, v in zip(nodes, seen, strict=True) if v is FAIL or (strict and v is UNKNOWN)
        }


class TestProbe:
    """What a node sees, on this machine."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunDir:
        run = RunDir.create(tmp_path, "run")
        run.config.write_text("seed: 0\n")
        run.attempt(1).make()
        return run

    @staticmethod
    def look(run: RunDir, **changed: Any) -> NodeReport:
        asked = {
            "token": "",
            "visible_within": 0.0,
            "run_dir": run.root,
            "attempt": 1,
            "head": "127.0.0.1",
            "interface": None,
            "gpus": False,
            **changed,
        }
        return probe.look("n1", argparse.Namespace(**asked))

    def test_as_the_step_runs_it(self, run: RunDir) -> None:
        argv = [
            sys.executable,
            "-m",
            "clusterrun.preflight.probe",
            f"--run-dir={run.root}",
            "--attempt=1",
            "--head=127.0.0.1",
        ]
        env = {**os.environ, "CLUSTERRUN_NODE": "node7", "CUDA_VISIBLE_DEVICES": "0,1,2"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
        (node, value), *others = frames.decode(FRAME, done.stdout.splitlines()).items()
        assert not others
        report = NodeReport.from_json(value)
        assert (node, report.node, report.visible_gpus) == ("node7", "node7", 3)
        assert report.cpus == len(os.sched_getaffinity(0))
        assert report.python == ".".join(map(str, sys.version_info[:3]))
        assert report.packages["torch"] not in ("", "missing")
        assert report.run_dir_problem == ""
        assert report.port is not None
        assert network.is_free("127.0.0.1", report.port)
        assert list(run.attempt(1).preflight.iterdir()) == []  # the test file is gone again

    def test_no_driver_is_unknown_not_zero(self, run: RunDir) -> None:
        if Path("/proc/driver/nvidia").exists():
            pytest.skip("this machine has a driver")
        report = self.look(run, gpus=True)
        assert report.nvml_gpus is None
        assert report.nvml_problem
        evidence = Evidence(("n1",), {"n1": report}, GPUS, PreflightConfig(), (report.time, report.time))
        assert verdicts(basic.gpu_count(evidence)) == {"n1": UNKNOWN}

    def test_no_such_interface(self, run: RunDir) -> None:
        report = self.look(run, interface="ib7")
        assert (report.address, report.port) == (None, None)
        assert "ib7" in report.address_problem

    def test_run_directory_not_there(self, run: RunDir) -> None:
        run.config.unlink()
        assert self.look(run).run_dir_problem == f"{run.config}: not visible on this node"

    def test_run_directory_that_can_not_be_written(self, run: RunDir) -> None:
        run.attempt(1).preflight.rmdir()
        problem = self.look(run).run_dir_problem
        assert str(run.attempt(1).preflight) in problem
        assert problem.endswith("No such file or directory")

    @pytest.mark.parametrize(
        ("value", "count"),
        [
            (None, None),
            ("", 0),
            ("0", 1),
            ("0,1,2", 3),
            ("GPU-8a,MIG-1/2/3", 2),
            ("NoDevFiles", 0),
            ("-1", 0),
            ("0,-1,1", 1),
        ],
    )
    def test_visible_gpus(self, value: str | None, count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if value is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert probe.visible_gpus() == count

    def test_node_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("CLUSTERRUN_NODE", "SLURMD_NODENAME"):
            monkeypatch.delenv(name, raising=False)
        assert probe.node_name() == os.uname().nodename
        monkeypatch.setenv("SLURMD_NODENAME", "c4")
        assert probe.node_name() == "c4"
        monkeypatch.setenv("CLUSTERRUN_NODE", "node1")
        assert probe.node_name() == "node1"


def test_report_of_a_newer_version() -> None:
    value = json.loads(json.dumps({**dataclasses.asdict(GOOD), "colour": "green"}))
    assert NodeReport.from_json(value) == GOOD


def test_finding_in_words() -> None:
    found = Finding("clock", "c1", WARN, "off by 7 s", "check NTP")
    assert str(found) == "WARN c1 clock: off by 7 s (check NTP)"
    assert found.as_json()["verdict"] == "WARN"
