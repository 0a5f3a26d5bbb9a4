"""NICs and PCI distances from a made /sys tree, joined with GPUs that the stub driver reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.topology import node, sysfs
from clusterrun.topology.model import Gpu, Topology
from clusterrun.topology.nvml_ask import NvmlUnavailable

SWITCH_A = "pci0000:00/0000:00:01.0/0000:01:00.0"  # root port, upstream port of a switch
DEVICES = {  # path below /sys/devices, NUMA node
    "0000:07:00.0": (f"{SWITCH_A}/0000:02:00.0/0000:07:00.0", 0),  # GPU0
    "0000:0f:00.0": (f"{SWITCH_A}/0000:02:01.0/0000:0f:00.0", 0),  # GPU1, same switch
    "0000:17:00.0": ("pci0000:00/0000:00:03.0/0000:17:00.0", 0),  # GPU2, another root port
    "0000:9f:00.0": ("pci0000:80/0000:80:01.0/0000:9f:00.0", 1),  # GPU3, other socket
    "0000:09:00.0": (f"{SWITCH_A}/0000:02:02.0/0000:09:00.0", 0),  # mlx5_0 behind the switch
    "0000:09:00.1": (f"{SWITCH_A}/0000:02:02.0/0000:09:00.1", 0),  # mlx5_1, second port of that card
    "0000:41:00.0": ("pci0000:40/0000:40:01.0/0000:41:00.0", 0),  # mlx5_2, another host bridge of that node
    "0000:0b:00.0": (f"{SWITCH_A}/0000:02:03.0/0000:0a:00.0/0000:0a:01.0/0000:0b:00.0", 0),  # mlx5_10, a second switch
}
NICS = {"mlx5_0": "0000:09:00.0", "mlx5_1": "0000:09:00.1", "mlx5_2": "0000:41:00.0", "mlx5_10": "0000:0b:00.0"}
GPUS = ["0000:07:00.0", "0000:0f:00.0", "0000:17:00.0", "0000:9f:00.0"]


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for address, (below, numa) in DEVICES.items():
        device = tmp_path / "devices" / below
        put(device / "numa_node", str(numa))
        put(device / "local_cpulist", "0-31" if numa == 0 else "32-63")
        put(device / "vendor", "0x10de" if address in GPUS else "0x15b3")
        put(device / "class", "0x030200" if address in GPUS else "0x020700")
        link = tmp_path / "bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    for name, address in NICS.items():
        port = tmp_path / "class/infiniband" / name / "ports/1"
        put(port / "rate", "200 Gb/sec (4X HDR)")
        put(port / "state", "4: ACTIVE")
        put(port / "phys_state", "5: LinkUp")
        put(port / "link_layer", "InfiniBand")
        (tmp_path / "class/infiniband" / name / "device").symlink_to(tmp_path / "devices" / DEVICES[address][0])
    put(tmp_path / "devices/system/node/online", "0-1")
    return tmp_path


def test_bus_ids() -> None:
    assert sysfs.bus_id("00000000:C7:00.0") == "0000:c7:00.0"
    assert sysfs.bus_id("00010000:01:00.0") == "10000:01:00.0"
    assert sysfs.bus_id("0000:07:00.0") == "0000:07:00.0"


def test_distances_to_gpus(tree: Path) -> None:
    gpus = [sysfs.place(address, tree) for address in GPUS]
    nics = sysfs.with_paths(sysfs.read_nics(tree), gpus, sysfs.host_numa(tree))
    assert [nic.device for nic in nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"]
    got = {nic.device: [str(link) for link in nic.links] for nic in nics}
    assert got == {
        "mlx5_0": ["PIX", "PIX", "PHB", "SYS"],
        "mlx5_1": ["PIX", "PIX", "PHB", "SYS"],
        "mlx5_2": ["NODE", "NODE", "NODE", "SYS"],
        "mlx5_10": ["PXB", "PXB", "PHB", "SYS"],
    }
    assert [str(link) for link in nics[0].nic_links] == ["X", "PIX", "NODE", "PXB"]
    first = nics[0]
    assert (first.rate_gbit_s, first.link_layer, first.state, first.physical_state) == (
        200.0,
        "InfiniBand",
        "ACTIVE",
        "LinkUp",
    )
    assert (first.numa, first.bus_id) == (0, "0000:09:00.0")


def test_gpu_distances_agree_in_both_directions(tree: Path) -> None:
    places = [sysfs.place(address, tree) for address in GPUS]
    matrix = [[str(sysfs.distance(a, b, (0, 1))) for b in places] for a in places]
    assert matrix[0] == ["X", "PIX", "PHB", "SYS"]
    assert matrix == [list(column) for column in zip(*matrix, strict=True)]


def test_unknown_numa_is_unknown_unless_there_is_one_node(tree: Path) -> None:
    put(tree / "devices" / DEVICES["0000:9f:00.0"][0] / "numa_node", "-1")
    one, other = sysfs.place(GPUS[0], tree), sysfs.place(GPUS[3], tree)
    assert sysfs.distance(one, other, (0, 1)) is None
    assert str(sysfs.distance(one, other, (0,))) == "NODE"
    assert sysfs.distance(one, None, (0,)) is None


def test_a_port_that_is_down_and_a_software_device(tree: Path) -> None:
    base = tree / "class/infiniband"
    put(base / "mlx5_0/ports/1/state", "1: DOWN")
    put(base / "mlx5_0/ports/1/phys_state", "3: Disabled")
    put(base / "mlx5_0/ports/1/rate", "")
    put(base / "rxe0/ports/1/state", "4: ACTIVE")
    nics = sysfs.with_paths(sysfs.read_nics(tree), [sysfs.place(GPUS[0], tree)], (0, 1))
    by_name = {nic.device: nic for nic in nics}
    down = by_name["mlx5_0"]
    assert (down.state, down.physical_state, down.rate_gbit_s) == ("DOWN", "Disabled", None)
    soft = by_name["rxe0"]
    assert (soft.links, soft.numa, soft.bus_id, soft.link_layer) == ((None,), None, None, None)


def test_best_port_of_a_card_with_two(tree: Path) -> None:
    port = tree / "class/infiniband/mlx5_2/ports/2"
    put(port / "state", "4: ACTIVE")
    put(port / "rate", "56 Gb/sec (4X FDR)")
    put(tree / "class/infiniband/mlx5_2/ports/1/state", "1: DOWN")
    assert {nic.device: nic.rate_gbit_s for nic, _ in sysfs.read_nics(tree)}["mlx5_2"] == 56.0


def test_node_joins_nvml_and_sysfs(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(f"GPU{i}", i, bus_id=address) for i, address in enumerate(GPUS))
    known = Topology(gpus, tuple((None,) * 4 for _ in range(4)), source="nvml")
    monkeypatch.setattr(node, "read_gpus", lambda **_: known)
    machine = node.read_node(root=tree)
    assert machine.host_numa == (0, 1)
    assert [gpu.numa for gpu in machine.gpus] == [(0,), (0,), (0,), (1,)]
    assert machine.gpus[3].cpu_affinity == "32-63"
    assert [str(link) for link in machine.nics[0].links] == ["PIX", "PIX", "PHB", "SYS"]


def test_gpus_that_nobody_answers_for_are_missing_not_absent(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(**_: object) -> Topology:
        raise NvmlUnavailable("no driver", absent=True)

    monkeypatch.setattr(node, "read_gpus", no_library)
    machine = node.read_node(root=tree)
    assert (machine.gpus, machine.complete, len(machine.nics)) == ((), False, 4)
    assert "4 NVIDIA GPU(s) on PCI" in machine.missing[1]


def test_an_empty_tree(tmp_path: Path) -> None:
    assert sysfs.read_nics(tmp_path) == []
    assert sysfs.host_numa(tmp_path) == ()
    assert sysfs.nvidia_functions(tmp_path) == []
    assert sysfs.place("0000:07:00.0", tmp_path) is None
