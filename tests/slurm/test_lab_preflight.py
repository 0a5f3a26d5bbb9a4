"""Preflight end to end on real Slurm, each host with a driver of its own (the real pynvml against a stub)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterrun.ledger import Ending
from support import TESTS, attempts, clusterrun, run_dir

sys.path.insert(0, str(TESTS / "nvml_stub"))
import scenarios

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("lab")]

HGX = [
    "+cluster=lab",
    "cluster.nproc_per_node=2",
    "cluster.interconnect.intra_node=nvswitch",
    "cluster.interconnect.nvlinks_per_pair=18",
    # The lab's hosts have no InfiniBand, and are one machine with one root file system and few limits of its own.
    "preflight.policy={nic_affinity: off}",
]
TRAIN = ["train=ddp_linear", "train.max_steps=20"]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scenarios.build(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def hosts(stub: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Overrides that give each of c1 to c4 a scenario; a sound HGX H100 where none is named."""

    def declare(**faulty: scenarios.Scenario) -> list[str]:
        folder = tmp_path / "scenarios"
        folder.mkdir(exist_ok=True)
        for host in ("c1", "c2", "c3", "c4"):
            scenarios.write(faulty.get(host, scenarios.healthy(scenarios.hgx_h100())), folder / host)
        return [f"cluster.env.LD_LIBRARY_PATH={stub}", f"cluster.env.NVML_STUB_SCENARIO='{folder}/%h'"]

    return declare


def dead_nvlink() -> scenarios.Scenario:
    """An HGX H100 whose GPU1 has lost all its NVLinks."""
    return scenarios.healthy(scenarios.hgx_h100()) | {f"field.1.165.{link}": 0 for link in range(18)}


def test_a_dead_nvlink_is_named_and_the_spare_trains(tmp_path: Path, hosts: Callable[..., list[str]]) -> None:
    begin = time.time()
    arguments = [*HGX, *TRAIN, *hosts(c2=dead_nvlink()), "cluster.nodes=3", "cluster.spare_nodes=1", "wait=true"]
    code, said = clusterrun(tmp_path, *arguments, "run_id=spare")
    assert code == 0, said
    (attempt,) = attempts(tmp_path, "spare")
    assert attempt.ending is Ending.done
    assert attempt.nodes == ("c1", "c3", "c4")
    report = run_dir(tmp_path, "spare").attempt(1).report("c2")
    assert report.stat().st_mtime - max(attempt.started, begin) < 10, "named within 10 s of the job's start"
    refused = json.loads(report.read_text())["refused"]
    assert "GPU1" in refused, refused

    code, listed = clusterrun(tmp_path, "nodes", "+cluster=lab", "--json")
    assert code == 0, listed
    (entry,) = json.loads(listed)
    assert entry["node"] == "c2"
    assert "GPU1" in entry["reason"]
    assert any("GPU0-GPU1: declared NV18, detected" in line for line in entry["evidence"])
    assert len(entry["gpus"]) == 8

    code, planned = clusterrun(tmp_path, "plan", "+cluster=lab", "--json")
    assert code == 0, planned
    assert "#SBATCH --exclude=c2\n" in json.loads(planned)["sbatch"]
    code, said = clusterrun(tmp_path, "nodes", "forgive", "c2", "+cluster=lab")
    assert code == 0, said
    assert "--exclude" not in json.loads(clusterrun(tmp_path, "plan", "+cluster=lab", "--json")[1])["sbatch"]


def test_too_few_healthy_nodes_is_exit_4_and_trains_nothing(tmp_path: Path, hosts: Callable[..., list[str]]) -> None:
    code, said = clusterrun(
        tmp_path, *HGX, *TRAIN, *hosts(c2=dead_nvlink()), "cluster.nodes=4", "run_id=few", "wait=true"
    )
    assert code == 4, said
    assert "3 of 4 nodes healthy" in said
    assert "GPU1" in said
    assert not list(run_dir(tmp_path, "few").attempt(1).logs.iterdir())


def test_shortage_by_policy_queues_again_without_the_bad_node(tmp_path: Path, hosts: Callable[..., list[str]]) -> None:
    policy = ["preflight.on_shortage=requeue", "cluster.nodes=3", "run_id=again", "wait=true"]
    code, said = clusterrun(tmp_path, *HGX, *TRAIN, *hosts(c2=dead_nvlink()), *policy)
    assert code == 0, said
    first, second = attempts(tmp_path, "again")
    assert first.ending is Ending.not_enough_nodes
    assert second.ending is Ending.done
    assert second.nodes == ("c1", "c3", "c4")


def test_a_wrong_declaration_refuses_all_and_excludes_nobody(tmp_path: Path, hosts: Callable[..., list[str]]) -> None:
    """PCIe boxes behind an NVSwitch label: the configuration is wrong, not the nodes."""
    pcie = {host: scenarios.rtx_4090() for host in ("c1", "c2", "c3", "c4")}
    code, said = clusterrun(tmp_path, *HGX, *TRAIN, *hosts(**pcie), "cluster.nodes=2", "run_id=label", "wait=true")
    assert code == 3, said
    assert "declared NV18, detected" in said
    code, listed = clusterrun(tmp_path, "nodes", "+cluster=lab", "--json")
    assert json.loads(listed) == []


def test_preflight_as_a_job_of_its_own(tmp_path: Path, hosts: Callable[..., list[str]]) -> None:
    nodes = ["cluster.nodes=4"]
    code, said = clusterrun(tmp_path, "preflight", *HGX, *hosts(), *nodes)
    assert code == 0, said
    assert said.count("healthy") == 4
    code, said = clusterrun(tmp_path, "preflight", *HGX, *hosts(c3=dead_nvlink()), *nodes, "name=bad")
    assert code == 3, said
    assert said.count("refused") == 1
    assert "GPU1" in said
