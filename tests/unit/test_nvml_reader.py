"""The NVML reader with the real pynvml binding, against a stub driver compiled for the test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterrun.topology.classify import Wiring, WiringClass, classify
from clusterrun.topology.model import Topology
from clusterrun.topology.node import read_gpus, read_node
from clusterrun.topology.nvml_ask import NvmlUnavailable

sys.path.insert(0, str(Path(__file__).parents[1] / "nvml_stub"))
import scenarios

Read = Callable[..., Topology]


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with the stub: as a current driver, and as two older ones."""
    base = tmp_path_factory.mktemp("nvml")
    return {old: scenarios.build(base / f"old{old}", old) for old in (0, 1, 2)}


@pytest.fixture
def read(drivers: dict[int, Path], tmp_path: Path) -> Read:
    """Reads a scenario by name through the whole path: worker process, pynvml, stub, snapshot."""

    def run(name: str, old: int = 0, timeout_s: float = 20.0) -> Topology:
        path = scenarios.write(scenarios.ALL[name](), tmp_path / f"{name}.txt")
        env = {**os.environ, "LD_LIBRARY_PATH": str(drivers[old]), "NVML_STUB_SCENARIO": str(path)}
        return read_gpus(timeout_s=timeout_s, env=env)

    return run


def tokens(machine: Topology) -> list[list[str | None]]:
    return [[None if link is None else str(link) for link in row] for row in machine.links]


def wired(machine: Topology) -> tuple[WiringClass, str | None, str | None]:
    found: Wiring = classify(machine)
    return found.kind, str(found.worst) if found.worst else None, str(found.best) if found.best else None


SOUND = [
    ("dgx_a100", 8, WiringClass.FULL_NVLINK_MESH, "NV12", "NV12"),
    ("hgx_h100", 8, WiringClass.FULL_NVLINK_MESH, "NV18", "NV18"),
    ("dgx2_unprintable", 16, WiringClass.FULL_NVLINK_MESH, "NV6", "NV6"),
    ("v100_cube", 8, WiringClass.PARTIAL_NVLINK_MESH, "SYS", "NV2"),
    ("a100_bridges", 4, WiringClass.NVLINK_PAIRS, "SYS", "NV12"),
    ("rtx_4090", 8, WiringClass.PCIE_CROSS_SOCKET, "SYS", "SYS"),
    ("l40s", 4, WiringClass.PCIE_SAME_SOCKET, "NODE", "PIX"),
    ("gb200_tray", 4, WiringClass.FULL_NVLINK_MESH, "NV18", "NV18"),
    ("mig", 8, WiringClass.FULL_NVLINK_MESH, "NV12", "NV12"),
]


@pytest.mark.parametrize(("name", "count", "kind", "worst", "best"), SOUND)
def test_sound_machines(read: Read, name: str, count: int, kind: WiringClass, worst: str, best: str) -> None:
    machine = read(name)
    assert len(machine.gpus) == count
    assert wired(machine) == (kind, worst, best)
    assert machine.complete, machine.missing
    assert classify(machine).weak == ()
    first = machine.gpus[0]
    assert (first.bus_id, first.uuid) == ("0000:07:00.0", "GPU-00000000-0000-0000-0000-000000000000")
    assert (first.cpu_affinity, first.numa) == ("0-31", (0,))
    assert (first.pcie_gen, first.pcie_width, first.pcie_width_max) == (1, 16, 16)


def test_hybrid_cube_pair_by_pair(read: Read) -> None:
    matrix = tokens(read("v100_cube"))
    for i in range(8):
        for j in range(8):
            bond = scenarios.CUBE.get((min(i, j), max(i, j)))
            assert matrix[i][j] == ("X" if i == j else f"NV{bond}" if bond else "NODE" if i // 4 == j // 4 else "SYS")


def test_what_nvml_does_not_say_is_not_made_up(read: Read) -> None:
    machine = read("rtx_4090")
    gpu = machine.gpus[0]
    assert (gpu.serial, gpu.mig, gpu.gpu_numa_id, gpu.fabric, gpu.fabric_ok) == (None, None, None, None, None)
    assert gpu.ports == ()
    assert machine.p2p is not None
    assert machine.p2p[0][:2] == (None, False)


def test_grace_memory_nodes(read: Read) -> None:
    machine = read("gb200_tray")
    assert [gpu.gpu_numa_id for gpu in machine.gpus] == [2, 10, 18, 26]
    assert {gpu.fabric_ok for gpu in machine.gpus} == {True}


def test_mig_is_noted(read: Read) -> None:
    machine = read("mig")
    assert all(gpu.mig for gpu in machine.gpus)
    assert len(machine.notes) == 8


def test_wsl_knows_gpus_and_no_links(read: Read) -> None:
    machine = read("wsl")
    assert [gpu.model for gpu in machine.gpus] == ["NVIDIA GeForce RTX 3090"] * 2
    assert tokens(machine) == [["X", None], [None, "X"]]
    assert wired(machine)[0] is WiringClass.UNKNOWN
    assert machine.gpus[0].cpu_affinity is None
    assert "GPU0-GPU1" in machine.missing[0]


@pytest.mark.parametrize("name", ["gpu_lost", "gpu_lost_later"])
def test_gpu_fallen_off_the_bus(read: Read, name: str) -> None:
    machine = read(name)
    assert len(machine.gpus) == 8
    assert "fallen off the bus" in str(machine.gpus[5].error)
    assert tokens(machine)[0] == ["X", *["NV18"] * 4, None, "NV18", "NV18"]
    assert len(machine.missing) == 1
    assert machine.missing[0].startswith("GPU5: ")
    assert wired(machine) == (WiringClass.FULL_NVLINK_MESH, "NV18", "NV18")
    assert classify(machine).islands == ((0, 1, 2, 3, 4, 6, 7),)


def test_links_down_behind_nvswitch(read: Read) -> None:
    machine = read("link_down")
    found = classify(machine)
    assert {tokens(machine)[3][j] for j in range(8) if j != 3} == {"NV16"}
    assert found.weak_gpus == (3,)
    assert len(found.weak) == 7
    assert [port.link for port in machine.gpus[3].ports or () if port.active is False] == [4, 11]


def test_link_down_in_a_bridge(read: Read) -> None:
    machine = read("bridge_link_down")
    (weak,) = classify(machine).weak
    assert (weak.gpus, str(weak.link), str(weak.expected)) == ((2, 3), "NV11", "NV12")


def test_a_port_that_nvml_cannot_judge_makes_its_links_unknown(read: Read) -> None:
    machine = read("link_state_unknown")
    assert tokens(machine)[6] == [None] * 6 + ["X", None]
    assert tokens(machine)[0][1] == "NV12"
    assert "nvmlDeviceGetNvLinkState gave error 999" in machine.missing[0]


def test_fabric_faults(read: Read) -> None:
    machine = read("fabric_not_ready")
    assert (machine.gpus[0].fabric, machine.gpus[0].fabric_ok) == ("in_progress", False)
    assert (machine.gpus[1].fabric, machine.gpus[1].fabric_ok) == ("completed", False)
    assert machine.gpus[1].fabric_faults == ("degraded bandwidth", "fabric manager disconnected")


def test_older_driver_without_remote_type(read: Read) -> None:
    """A switch hides its bus id, and a peer's is known: both still count."""
    assert wired(read("hgx_h100", old=1)) == (WiringClass.FULL_NVLINK_MESH, "NV18", "NV18")
    assert wired(read("v100_cube", old=1)) == (WiringClass.PARTIAL_NVLINK_MESH, "SYS", "NV2")
    assert read("v100_cube", old=1).gpus[0].numa == ()


def test_older_driver_and_a_remote_that_may_be_anything(read: Read) -> None:
    machine = read("dgx_a100", old=1)  # its switches show a bus id that is no GPU of this machine
    assert tokens(machine)[0] == ["X"] + [None] * 7


def test_driver_without_nvlink_calls_says_unknown_not_pcie(read: Read) -> None:
    machine = read("hgx_h100", old=2)
    assert {link for i, row in enumerate(tokens(machine)) for j, link in enumerate(row) if i != j} == {None}
    assert "nvmlDeviceGetNvLinkCapability gave error 13" in machine.missing[0]


def test_a_driver_that_hangs_is_given_up(read: Read) -> None:
    begin = time.monotonic()
    with pytest.raises(NvmlUnavailable, match="did not answer within 1 s"):
        read("hangs", timeout_s=1.0)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("name", "words", "absent"),
    [
        ("no_driver_loaded", "installed but not loaded", False),
        ("version_mismatch", "does not start", False),
        ("no_gpu", "finds no GPU", True),
    ],
)
def test_no_nvml(read: Read, name: str, words: str, absent: bool) -> None:
    with pytest.raises(NvmlUnavailable, match=words) as caught:
        read(name)
    assert caught.value.absent is absent


def test_machine_without_a_driver(tmp_path: Path) -> None:
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    with pytest.raises(NvmlUnavailable, match=r"libnvidia-ml.so.1 is not there|finds no GPU"):
        read_gpus(env=env)
    machine = read_node(root=tmp_path, env=env)
    assert (machine.gpus, machine.complete) == ((), True)
    assert machine.notes
