"""The state of GPUs as the real pynvml binding reads it from the stub driver, and what the checks make of it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.schema import (
    Accelerator,
    ClusterConfig,
    InterconnectConfig,
    InterNode,
    IntraNode,
    PreflightConfig,
)
from clusterrun.preflight import gpu_facts, probe
from clusterrun.preflight.checks import ALL
from clusterrun.preflight.checks.gpu import GPU
from clusterrun.preflight.checks.wiring import WIRING
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.gpu_facts import GpuFacts, read_gpu_facts
from clusterrun.preflight.report import Finding, NodeReport, Verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "nvml_stub"))
import scenarios

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
Read = Callable[..., GpuFacts]
CHECKS = {**GPU, **WIRING}


def cluster(model: str, gpus: int, wiring: IntraNode, nvlinks: int | None) -> ClusterConfig:
    return ClusterConfig(
        gpus_per_node=gpus,
        nproc_per_node=gpus,
        gpu_model=model,
        accelerator=Accelerator.cuda,
        interconnect=InterconnectConfig(intra_node=wiring, nvlinks_per_pair=nvlinks, inter_node=InterNode.none),
    )


H100 = cluster("NVIDIA H100 80GB HBM3", 8, IntraNode.nvswitch, 18)
DECLARED = {
    "hgx_h100": H100,
    "dgx_a100": cluster("NVIDIA A100-SXM4-80GB", 8, IntraNode.nvswitch, 12),
    "a100_bridges": cluster("NVIDIA A100 80GB PCIe", 4, IntraNode.nvlink_pairs, 12),
    "l40s": cluster("NVIDIA L40S", 4, IntraNode.pcie, None),
    "gb200_tray": cluster("NVIDIA GB200", 4, IntraNode.nvswitch, 18),
}


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with the stub: as a current driver, and as two older ones."""
    base = tmp_path_factory.mktemp("nvml_facts")
    return {old: scenarios.build(base / f"old{old}", old) for old in (0, 1, 2)}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A machine without NICs and with the IOMMU off."""
    (tmp_path / "sys/kernel/iommu_groups").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("BOOT_IMAGE=/vmlinuz quiet\n")
    return tmp_path


@pytest.fixture
def read(drivers: dict[int, Path], tree: Path) -> Read:
    def run(facts: scenarios.Scenario, old: int = 0, timeout_s: float = 20.0, **env: str) -> GpuFacts:
        path = scenarios.write(facts, tree / "scenario.txt")
        env = {**os.environ, "LD_LIBRARY_PATH": str(drivers[old]), "NVML_STUB_SCENARIO": str(path), **env}
        return read_gpu_facts(timeout_s=timeout_s, loads=lambda: True, root=tree / "sys", proc=tree / "proc", env=env)

    return run


def report(facts: GpuFacts | None, node: str = "c1", **changed: Any) -> NodeReport:
    known: dict[str, Any] = {f.name: None for f in dataclasses.fields(NodeReport)}
    one = NodeReport(**{**known, "node": node, "host": node, "gpus": facts, **changed})
    return NodeReport.from_json(json.loads(json.dumps(dataclasses.asdict(one))))  # as it arrives


def judge(facts: GpuFacts | None, declared: ClusterConfig = H100) -> dict[str, Finding]:
    evidence = Evidence(("c1",), {"c1": report(facts)}, declared, PreflightConfig(), (0.0, 1.0))
    return {name: found for name, check in CHECKS.items() for found in check(evidence)}


def not_passed(found: dict[str, Finding]) -> dict[str, Verdict]:
    return {name: one.verdict for name, one in found.items() if one.verdict is not PASS}


@pytest.mark.parametrize("name", DECLARED)
def test_sound_machines_as_declared(read: Read, name: str) -> None:
    facts = read(scenarios.healthy(scenarios.ALL[name]()))
    assert (facts.problem, facts.absent, facts.counted) == ("", False, DECLARED[name].gpus_per_node)
    found = judge(facts, DECLARED[name])
    assert not_passed(found) == {}, [str(one) for one in found.values()]
    assert found["wiring_as_declared"].finding.startswith("all ")


def test_every_fact_arrives(read: Read) -> None:
    facts = read(scenarios.healthy(scenarios.hgx_h100()), CUDA_VISIBLE_DEVICES="1,GPU-00000003")
    assert (facts.driver, facts.cuda) == ("550.54.15", "12.4")
    assert (facts.iommu_groups, facts.iommu_options) == (0, ())
    gpu = facts.health[1]
    unknown = {f.name for f in dataclasses.fields(gpu) if getattr(gpu, f.name) is None}
    assert unknown == {"retired_pages", "retired_pending"}  # an H100 remaps rows instead
    assert (gpu.serial, gpu.capability, gpu.power_limit_w, gpu.margin_c) == ("1650000001", "9.0", 400.0, 50)
    assert gpu.memory_used_bytes == 64 << 20  # the driver's own reserve is not in it
    assert gpu.ports_up == tuple(range(18))
    assert [one.mine for one in facts.health] == [False, True, False, True] + [False] * 4
    assert report(facts).gpus == facts


FAULTS: list[tuple[str, ClusterConfig, dict[str, Verdict], str, str]] = [
    ("link_down_here", H100, {"wiring_as_declared": FAIL, "nvlinks_up": FAIL}, "wiring_as_declared",
     "GPU0-GPU5: declared NV18, detected SYS, GPU1-GPU5: declared NV18, detected SYS"),
    ("link_down_here", H100, {"wiring_as_declared": FAIL, "nvlinks_up": FAIL}, "wiring_as_declared",
     "and 3 more; likely culprit: GPU5 (serial 1650000005)"),
    ("half_links", H100, {"wiring_as_declared": FAIL, "nvlinks_up": FAIL}, "nvlinks_up",
     "GPU3 (serial 1650000003): 9 of 18 NVLinks up, not up: 9, 10, 11, 12 and 5 more"),
    ("half_links_hidden", H100, {"wiring_as_declared": FAIL, "nvlinks_up": FAIL}, "nvlinks_up",
     "GPU3 (serial 1650000003): 9 of 18 NVLinks up"),
    ("slow_link", H100, {"nvlink_speed": FAIL}, "nvlink_speed", "(serial 1650000006): NVLink 7 at 13.281 of 26.562"),
    ("link_errors", H100, {"nvlink_errors": FAIL}, "nvlink_errors", "CRC data 4, replay 3"),
    ("lost", H100, {"gpu_lost": FAIL, "wiring_as_declared": UNKNOWN}, "gpu_lost", "GPU5: GPU is lost (fallen off"),
    ("lost_while_asked", H100, {"gpu_lost": FAIL}, "gpu_lost", "GPU5 (serial 1650000005): GPU is lost (fallen off"),
    ("ecc_error", H100, {"ecc": FAIL}, "ecc", "GPU1 (serial 1650000001): 2 uncorrected ECC errors"),
    ("remap_pending", H100, {"row_remap": FAIL}, "row_remap", "GPU4 (serial 1650000004): row remapping pending"),
    ("remap_failed", H100, {"row_remap": FAIL}, "row_remap", "GPU4 (serial 1650000004): row remapping failed"),
    ("throttled", H100, {"throttle": FAIL}, "throttle", "(serial 1650000000): throttled: hardware thermal slowdown"),
    ("power_capped", H100, {"power_limit": FAIL}, "power_limit", "limited to 250 W, its peers to 400 W"),
    ("hot", H100, {"temperature": FAIL}, "temperature", "91 C, at or above the slowdown threshold"),
    ("xid", H100, {"xid_recovery": FAIL}, "xid_recovery", "the driver asks for: node reboot"),
    ("leftovers", H100, {"gpu_processes": FAIL, "gpu_memory_used": FAIL}, "gpu_processes", "in use by pid 4711, 4712"),
    ("narrow_slot", H100, {"pcie_width": FAIL, "pcie_generation": FAIL, "pcie_replays": FAIL}, "pcie_width",
     "GPU1 (serial 1650000001): PCIe x8 of x16"),
    ("fabric_waits", H100, {"fabric": FAIL}, "fabric", "all 8 GPUs: fabric in_progress"),
    ("no_p2p", H100, {"p2p": FAIL}, "p2p", "GPU2-GPU5 (NV18)"),
    ("mig_on", H100, {"mig_off": FAIL, "p2p": FAIL}, "mig_off", "GPU2 (serial 1650000002): MIG is on"),
    ("v100_pages", cluster("Tesla V100-SXM2-32GB", 4, IntraNode.nvlink_mesh, 2), {"retired_pages": FAIL},
     "retired_pages", "GPU1 (serial 1650000001): 62 retired pages (limit 62); GPU2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "declared", "expected", "check", "words"), FAULTS)
def test_a_fault_is_named_by_its_checks_and_by_no_other(
    read: Read, name: str, declared: ClusterConfig, expected: dict[str, Verdict], check: str, words: str
) -> None:
    found = judge(read(scenarios.ALL[name]()), declared)
    assert not_passed(found) == expected
    assert words in found[check].finding
    assert "\n" not in str(found[check])
    assert found[check].advice


def test_other_wiring_than_declared(read: Read) -> None:
    """A PCIe box behind an NVSwitch label, and the other way round."""
    pcie = read(scenarios.healthy(scenarios.l40s()))
    found = judge(pcie, dataclasses.replace(DECLARED["dgx_a100"], gpu_model=None))
    assert set(not_passed(found)) == {"wiring_as_declared", "nvlinks_up"}
    assert "culprit" not in found["wiring_as_declared"].finding
    found = judge(read(scenarios.healthy(scenarios.dgx_a100())), cluster(H100.gpu_model or "", 8, IntraNode.pcie, None))
    assert not_passed(found) == {"gpu_model": FAIL, "wiring_as_declared": WARN}
    assert "declared PCIe only, detected NV12" in found["wiring_as_declared"].finding


def test_a_virtual_gpu_is_unknown_not_faulty(read: Read) -> None:
    found = judge(read(scenarios.vgpu()), cluster("NVIDIA A100-40C", 2, IntraNode.pcie, None))
    assert set(not_passed(found).values()) == {UNKNOWN}
    assert {"ecc", "row_remap", "xid_recovery", "throttle", "power_limit", "clocks"} <= set(not_passed(found))
    assert found["gpu_lost"].verdict is found["gpu_model"].verdict is PASS


@pytest.mark.parametrize(("old", "missing"), [(1, set()), (2, {"nvlinks_up", "row_remap", "gpu_processes", "fabric"})])
def test_an_older_driver_lacks_symbols(read: Read, old: int, missing: set[str]) -> None:
    """What it can't say is UNKNOWN; the older names of its functions are used."""
    found = judge(read(scenarios.healthy(scenarios.hgx_h100()), old=old))
    assert set(not_passed(found).values()) <= {UNKNOWN}
    assert missing <= set(not_passed(found)), not_passed(found)
    assert found["throttle"].verdict is found["temperature"].verdict is found["gpu_memory_used"].verdict is PASS


@pytest.mark.parametrize("name", ["hangs", "slow_to_answer"])
def test_a_driver_that_hangs(read: Read, name: str) -> None:
    begin = time.monotonic()
    facts = read(scenarios.ALL[name](), timeout_s=1.0)
    assert time.monotonic() - begin < 5
    assert facts.problem == "NVML did not answer within 1 s: the driver hangs"
    assert (facts.absent, facts.counted) == (False, None)
    found = judge(facts)
    assert {one.verdict for check, one in found.items() if check != "iommu_acs"} == {UNKNOWN}
    assert set(found) == set(CHECKS)
    assert all("hangs" in one.finding for check, one in found.items() if check != "iommu_acs")


@pytest.mark.parametrize(
    ("name", "words", "absent", "counted"),
    [
        ("no_driver_loaded", "installed but not loaded", False, None),
        ("version_mismatch", "does not start", False, None),
        ("no_gpu", "finds no GPU", True, 0),
    ],
)
def test_no_nvml(read: Read, name: str, words: str, absent: bool, counted: int | None) -> None:
    facts = read(scenarios.ALL[name]())
    assert words in facts.problem
    assert (facts.absent, facts.counted) == (absent, counted)
    assert probe.count_gpus(facts) == (counted, facts.problem)
    assert facts.topology is not None  # the NICs are there all the same


def test_without_a_driver_nothing_is_started(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_facts, "ask_worker", lambda *_, **__: pytest.fail("started"))
    begin = time.perf_counter()
    facts = read_gpu_facts(loads=lambda: False, root=tree / "sys", proc=tree / "proc")
    assert time.perf_counter() - begin < 0.05
    assert "libnvidia-ml.so.1 is not there" in facts.problem
    assert (facts.absent, facts.counted, facts.health) == (True, None, ())


@pytest.mark.parametrize(
    "printed", ["", "{}", "[]", '{"health": [{"index": 0, "odd": 1}], "topology": {}, "cuda": null}']
)
def test_a_worker_that_prints_nonsense(tree: Path, monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    monkeypatch.setattr(gpu_facts, "ask_worker", lambda *_, **__: printed)
    facts = read_gpu_facts(loads=lambda: True, root=tree / "sys", proc=tree / "proc")
    assert "something unreadable" in facts.problem
    assert not facts.absent
    assert judge(facts)["ecc"].verdict is UNKNOWN


def test_each_host_of_the_lab_can_have_a_scenario_of_its_own(read: Read, tree: Path) -> None:
    scenarios.write(scenarios.machine(2, "NVIDIA L40S", "8.9", 48, 4), tree / f"gpus-{os.uname().nodename}")
    assert read({}, NVML_STUB_SCENARIO=str(tree / "gpus-%h")).counted == 2


def test_a_rehearsal_on_a_cpu_cluster(read: Read) -> None:
    """Where the stub driver plays GPUs, they are judged as declared; a CPU node without them is left in peace."""
    lab = dataclasses.replace(H100, accelerator=Accelerator.cpu, gpu_model=None)
    evidence = Evidence(
        ("c1", "c2", "c3"),
        {"c1": report(read(scenarios.link_down_here())), "c2": report(None, "c2"), "c3": report(GpuFacts(), "c3")},
        lab,
        PreflightConfig(),
        (0.0, 1.0),
    )
    found = [one for name in CHECKS for one in ALL[name](evidence)]
    assert {one.node for one in found} == {"c1"}
    assert {one.check for one in found if one.verdict is FAIL} == {"wiring_as_declared", "nvlinks_up"}
