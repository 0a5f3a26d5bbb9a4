"""Preflight's storage checks on real NFS mounts: what the options are, what is seen, and a server that is gone."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from guests import EXPORTS, MOUNTS, lab, python, run

from clusterrun import frames
from clusterrun.config import frozen
from clusterrun.config.schema import ClusterConfig, PreflightConfig, RunConfig
from clusterrun.launch.commands import preflight_argv
from clusterrun.preflight.checks.host import HOST
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import FRAME, NodeReport, Verdict
from clusterrun.rundir import RUNS, RunDir

pytestmark = pytest.mark.nfs

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
STORAGE = [name for name in HOST if name.startswith("storage_")]


def new_run(name: str, config: RunConfig) -> RunDir:
    """On the export, as the server has it; in the guests it is at the same place below their mounts."""
    made = RunDir.create(EXPORTS / "main", name)
    made.config.write_text(frozen.to_yaml(config))
    made.attempt(1).make()
    made.attempt(1).token("here").write_text("here")
    return made


def probe(guest: str, mount: Path, made: RunDir, config: RunConfig) -> subprocess.Popen[str]:
    """Start the probe that preflight's step runs, in a guest, on the run directory as mounted there."""
    argv = preflight_argv(config, RunDir(mount / RUNS / made.id), 1, "10.78.0.1", "here")
    return python(guest, *argv[1:], env={"CLUSTERRUN_NODE": guest, "OMP_NUM_THREADS": "1"})


def judged(probes: Sequence[subprocess.Popen[str]], config: RunConfig, timeout_s: float) -> dict[str, dict[str, str]]:
    """node -> check -> "verdict: finding", once all have answered."""
    reader = frames.Reader(FRAME)
    for one in probes:
        reader.feed(one.communicate(timeout=timeout_s)[0].splitlines())
    reports = {node: NodeReport.from_json(report) for node, report in reader.messages().items()}
    evidence = Evidence(tuple(reports), reports, config.cluster, config.preflight, (0.0, 1.0))
    found: dict[str, dict[str, str]] = {node: {} for node in reports}
    for check in STORAGE:
        for finding in HOST[check](evidence):
            found[finding.node][check] = f"{finding.verdict.value}: {finding.finding}"
    return found


def mounted(guest: str, options: str) -> Path:
    point = Path("/run/preflight") / options
    run(guest, "mkdir", "-p", str(point))
    run(guest, "mount", "-t", "nfs", "-o", options, "server:/main", str(point))
    return point


def test_options_of_real_mounts(nfs_lab: None) -> None:
    config = RunConfig(cluster=ClusterConfig(nodes=2))
    made = new_run("options", config)
    soft, nocto = mounted("n1", "vers=4.2,soft"), mounted("n1", "vers=4.2,nocto")
    plain, nolock = MOUNTS / "main", mounted("n2", "vers=3,nolock")
    good, softly = (judged([probe(*where, made, config)], config, 60) for where in (("n2", plain), ("n1", soft)))
    assert {check: said.partition(":")[0] for check, said in good["n2"].items()} == {
        **dict.fromkeys(STORAGE, "PASS"),
        "storage_space": "WARN",  # the export has 1 GiB
    }
    assert good["n2"]["storage_same"] == "PASS: nfs4 from 10.78.0.1:/main"
    assert softly["n1"]["storage_options"] == "WARN: mounted soft"
    cached, unlocked = (judged([probe(*where, made, config)], config, 60) for where in (("n1", nocto), ("n2", nolock)))
    assert cached["n1"]["storage_options"] == "WARN: mounted nocto"
    assert unlocked["n2"]["storage_locks"].startswith("FAIL: mounted ")
    assert "locks don't reach other nodes" in unlocked["n2"]["storage_locks"]


def test_a_server_out_of_reach_is_a_finding_and_no_hang(nfs_lab: None) -> None:
    config = RunConfig(cluster=ClusterConfig(nodes=2), preflight=PreflightConfig(visible_within_s=1.0))
    made = new_run("out-of-reach", config)
    run("n1", "ls", str(MOUNTS / "main" / RUNS / made.id))
    lab("fault", "cable-pull", "n1")
    began = time.monotonic()
    found = judged([probe(guest, MOUNTS / "main", made, config) for guest in ("n1", "n2")], config, 60)
    assert time.monotonic() - began < 40
    assert found["n1"]["storage_options"].startswith("UNKNOWN: no answer from the file system of /run/nfs/main")
    assert found["n2"]["storage_visible"].startswith("PASS")
