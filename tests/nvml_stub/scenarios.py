"""Scenario files for the NVML stub: machines as their drivers describe them, sound and broken.

Figures (links per GPU, memory, PCIe generation) follow shared/wiring_reference.md section 2.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml_stub.c")
Scenario = dict[str, object]

PIX, PXB, PHB, NODE, SYS = 10, 20, 30, 40, 50
GPU, SWITCH = 0, 2
NOT_SUPPORTED, GPU_IS_LOST, UNKNOWN = 3, 15, 999


def build(folder: Path, old_driver: int = 0) -> Path:
    """Compile the stub into ``folder`` (for LD_LIBRARY_PATH) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-O1", f"-DOLD_DRIVER={old_driver}", str(SOURCE)]
    subprocess.run([*command, "-o", str(folder / "libnvidia-ml.so.1")], check=True, capture_output=True, timeout=60)
    return folder


def write(scenario: Mapping[str, object], path: Path) -> Path:
    """The scenario as the file that NVML_STUB_SCENARIO names."""
    path.write_text("".join(f"{key} {value}\n" for key, value in scenario.items()), encoding="ascii")
    return path


def bus(gpu: int) -> str:
    """Bus id of a GPU, in NVML's spelling."""
    return f"00000000:{7 + 8 * gpu:02X}:00.0"


def machine(count: int, model: str, capability: str, memory_gib: int, gen: int, sockets: int = 2) -> Scenario:
    """GPUs spread evenly over sockets of 32 CPUs; no NVLink; PCIe paths NODE in a socket, SYS between."""
    facts: Scenario = {"driver": "550.54.15", "count": count}
    for i in range(count):
        socket = i * sockets // count
        facts |= {
            f"gpu.{i}.name": model,
            f"gpu.{i}.uuid": f"GPU-{i:08x}-0000-0000-0000-000000000000",
            f"gpu.{i}.bus": bus(i),
            f"gpu.{i}.capability": capability,
            f"gpu.{i}.memory": memory_gib << 30,
            f"gpu.{i}.cpus": " ".join(map(str, range(32 * socket, 32 * socket + 32))),
            f"gpu.{i}.numa": socket,
            f"gpu.{i}.pcie_gen": 1,  # idle links downshift
            f"gpu.{i}.pcie_gen_max": gen,
            f"gpu.{i}.pcie_width": 16,
            f"gpu.{i}.pcie_width_max": 16,
        }
        for j in range(i):
            facts[f"topo.{j}.{i}"] = NODE if j * sockets // count == socket else SYS
            facts[f"p2p.{j}.{i}"] = 0
    return facts


def add_port(facts: Scenario, gpu: int, link: int, kind: int, address: str, version: int) -> None:
    """One NVLink port that is up."""
    key = f"link.{gpu}.{link}"
    facts |= {f"{key}.p2p": 1, f"{key}.state": 1, f"{key}.type": kind, f"{key}.bus": address, f"{key}.version": version}
    facts[f"field.{gpu}.165.{link}"] = 1


def switched(facts: Scenario, links: int, version: int, address: str = "-") -> Scenario:
    """Every GPU has that many ports to NVSwitch; the fabric is up."""
    for i in range(int(str(facts["count"]))):
        facts |= {f"gpu.{i}.ports": links, f"gpu.{i}.fabric": 3, f"gpu.{i}.fabric_mask": 0xAA | 1 << 12 | 1 << 14}
        facts[f"gpu.{i}.mig"] = 0
        for link in range(links):
            add_port(facts, i, link, SWITCH, address, version)
    return facts


def direct(facts: Scenario, bonds: Mapping[tuple[int, int], int], version: int) -> Scenario:
    """GPU to GPU links: how many for each pair."""
    used: dict[int, int] = {}
    for (a, b), number in bonds.items():
        for one, other in ((a, b), (b, a)):
            for _ in range(number):
                add_port(facts, one, used.get(one, 0), GPU, bus(other), version)
                used[one] = used.get(one, 0) + 1
    for gpu, number in used.items():
        facts[f"gpu.{gpu}.ports"] = number
    return facts


#: Line rate of an NVLink in MB/s per direction, by compute capability.
LINK_MB_S = {"7.0": 25_781, "8.0": 25_000, "9.0": 26_562, "10.0": 53_125}


def healthy(facts: Scenario) -> Scenario:
    """The state of sound, idle GPUs of a data centre, as a current driver tells it."""
    facts = facts | {"cuda": 12_040}
    for i in range(int(str(facts["count"]))):
        key, capability = f"gpu.{i}", str(facts[f"gpu.{i}.capability"])
        facts |= {
            f"{key}.serial": 1_650_000_000 + i,
            f"{key}.pcie_replays": 0,
            f"{key}.ecc": 1,
            f"{key}.ecc_errors.1.0": 0,
            f"{key}.throttle": 1,  # idle
            f"{key}.power_mw": 400_000,
            f"{key}.power_default_mw": 400_000,
            f"{key}.temperature.0": 34,
            f"{key}.threshold.1": 89,
            f"{key}.persistence": 1,
            f"{key}.pids": "-",
            f"{key}.memory_used": 64 << 20,
            f"{key}.clock_max.1": 1_980,
            f"{key}.clock_max.2": 2_619,
            f"field.{i}.230.0": 0,
        }
        if float(capability) < 8:
            facts |= {f"{key}.retired.0": 1, f"{key}.retired.1": 0, f"{key}.retired_pending": 0}
        else:
            facts |= {f"{key}.remap": "0 0 0 0", f"{key}.mig": 0}
        if float(capability) >= 9:
            facts[f"{key}.margin"] = 50
        for link in range(int(str(facts.get(f"{key}.ports", 0)))):
            facts[f"field.{i}.164.{link}"] = LINK_MB_S[capability]
            facts |= {f"error.{i}.{link}.{counter}": 0 for counter in range(4)}
    return facts


def dgx_a100() -> Scenario:
    return switched(machine(8, "NVIDIA A100-SXM4-80GB", "8.0", 80, 4), 12, 3, "00000000:C7:00.0")


def hgx_h100() -> Scenario:
    return switched(machine(8, "NVIDIA H100 80GB HBM3", "9.0", 80, 5), 18, 4)


def dgx2_unprintable() -> Scenario:
    """Old switch systems hide the switch's bus id behind bytes that are not text."""
    facts = switched(machine(16, "Tesla V100-SXM3-32GB", "7.0", 32, 3), 6, 2, "garbage")
    return {key: value for key, value in facts.items() if not key.endswith(".type")}


CUBE = {  # bonds of a DGX-1V
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 1,
    (2, 6): 2, (3, 7): 2, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 1,
}  # fmt: skip


def v100_cube() -> Scenario:
    return direct(machine(8, "Tesla V100-SXM2-32GB", "7.0", 32, 3), CUBE, 2)


def a100_bridges() -> Scenario:
    return direct(machine(4, "NVIDIA A100 80GB PCIe", "8.0", 80, 4), {(0, 1): 12, (2, 3): 12}, 3)


def rtx_4090() -> Scenario:
    facts = machine(8, "NVIDIA GeForce RTX 4090", "8.9", 24, 4)
    return {key: 5 if key.startswith("p2p") else SYS if key.startswith("topo") else v for key, v in facts.items()}


def l40s() -> Scenario:
    facts = machine(4, "NVIDIA L40S", "8.9", 48, 4, sockets=1)
    return facts | {"topo.0.1": PIX, "topo.2.3": PXB, "topo.0.2": PHB, "topo.1.2": PHB}


def gb200_tray() -> Scenario:
    facts = switched(machine(4, "NVIDIA GB200", "10.0", 186, 5), 18, 5)
    return facts | {f"gpu.{i}.own_numa": 2 + 8 * i for i in range(4)}


def mig() -> Scenario:
    facts = dgx_a100() | {f"gpu.{i}.mig": 1 for i in range(8)}
    return {key: NOT_SUPPORTED if key.startswith("p2p") else value for key, value in facts.items()}


def wsl() -> Scenario:
    """WSL 2: identity and memory work, topology, affinity and NVLink don't."""
    facts = machine(2, "NVIDIA GeForce RTX 3090", "8.6", 24, 4, sockets=1)
    hidden = (".cpus", ".numa")
    return {key: v for key, v in facts.items() if not key.startswith(("topo", "p2p")) and not key.endswith(hidden)}


def gpu_lost() -> Scenario:
    return hgx_h100() | {"gpu.5.lost": GPU_IS_LOST}


def gpu_lost_later() -> Scenario:
    """The handle can still be had; the first question about the GPU fails."""
    return hgx_h100() | {"rc.nvmlDeviceGetPciInfo_v3.5": GPU_IS_LOST}


def link_down() -> Scenario:
    """GPU3 has lost two of its 18 links; the older call still says that they are up."""
    return hgx_h100() | {"field.3.165.4": 0, "field.3.165.11": 0}


def bridge_link_down() -> Scenario:
    facts = a100_bridges()
    return facts | {"link.2.0.state": 0, "link.3.0.state": 0}


def link_state_unknown() -> Scenario:
    return dgx_a100() | {"rc.nvmlDeviceGetNvLinkState.6.3": UNKNOWN}


def fabric_not_ready() -> Scenario:
    return hgx_h100() | {f"gpu.{i}.fabric": 2 for i in range(8)} | {"gpu.1.fabric": 3, "gpu.1.fabric_mask": 1 | 2 << 14}


def hangs() -> Scenario:
    return hgx_h100() | {"hang.nvmlDeviceGetCount_v2": 60}


def no_driver_loaded() -> Scenario:
    return {"rc.nvmlInitWithFlags": 9}


def version_mismatch() -> Scenario:
    return {"rc.nvmlInitWithFlags": 18}


def no_gpu() -> Scenario:
    return {"driver": "550.54.15", "count": 0}


def link_down_here() -> Scenario:
    """GPU5 has lost all its NVLinks."""
    return healthy(hgx_h100()) | {f"field.5.165.{link}": 0 for link in range(18)}


def half_links() -> Scenario:
    """GPU3 has half its NVLinks."""
    return healthy(hgx_h100()) | {f"field.3.165.{link}": 0 for link in range(9, 18)}


def half_links_hidden() -> Scenario:
    """As before, and the driver does not even list the ports that are gone."""
    return healthy(hgx_h100()) | {f"link.3.{link}.p2p": 0 for link in range(9, 18)}


def slow_link() -> Scenario:
    return healthy(hgx_h100()) | {"field.6.164.7": 13_281}


def link_errors() -> Scenario:
    return healthy(hgx_h100()) | {"error.2.5.0": 3, "error.2.9.3": 4}


def lost() -> Scenario:
    return healthy(hgx_h100()) | {"gpu.5.lost": GPU_IS_LOST}


def lost_while_asked() -> Scenario:
    """The last of the questions finds the GPU gone."""
    return healthy(hgx_h100()) | {"rc.nvmlDeviceGetMaxClockInfo.5": GPU_IS_LOST}


def ecc_error() -> Scenario:
    return healthy(hgx_h100()) | {"gpu.1.ecc_errors.1.0": 2}


def remap_pending() -> Scenario:
    return healthy(hgx_h100()) | {"gpu.4.remap": "0 1 1 0"}


def remap_failed() -> Scenario:
    return healthy(hgx_h100()) | {"gpu.4.remap": "0 8 0 1"}


def throttled() -> Scenario:
    return healthy(hgx_h100()) | {"gpu.0.throttle": 0x01 | 0x40}


def power_capped() -> Scenario:
    return healthy(hgx_h100()) | {"gpu.0.throttle": 0x04, "gpu.7.power_mw": 250_000}


def hot() -> Scenario:
    return healthy(hgx_h100()) | {"gpu.2.margin": -1, "gpu.2.temperature.0": 91}


def xid() -> Scenario:
    return healthy(hgx_h100()) | {"field.3.230.0": 2}


def leftovers() -> Scenario:
    return healthy(hgx_h100()) | {"gpu.6.pids": "4711 4712", "gpu.6.memory_used": 70 << 30}


def narrow_slot() -> Scenario:
    return healthy(hgx_h100()) | {"gpu.1.pcie_width": 8, "gpu.2.pcie_gen_max": 4, "gpu.3.pcie_replays": 1_200}


def fabric_waits() -> Scenario:
    return healthy(hgx_h100()) | {f"gpu.{i}.fabric": 2 for i in range(8)}


def no_p2p() -> Scenario:
    return healthy(hgx_h100()) | {"p2p.2.5": 4}


def mig_on() -> Scenario:
    """One GPU was left in MIG mode: peer-to-peer with it is refused."""
    facts = healthy(hgx_h100()) | {"gpu.2.mig": 1}
    return facts | {key: NOT_SUPPORTED for key in facts if key.startswith("p2p.") and "2" in key.split(".")[1:]}


def vgpu() -> Scenario:
    """Two virtual GPUs: the driver in a virtual machine answers little of the hardware's state."""
    facts = machine(2, "NVIDIA A100-40C", "8.0", 40, 4, sockets=1)
    return facts | {f"gpu.{i}.memory_used": 0 for i in range(2)} | {f"gpu.{i}.pids": "-" for i in range(2)}


def slow_to_answer() -> Scenario:
    """Topology works, a question about health never returns."""
    return healthy(hgx_h100()) | {"hang.nvmlDeviceGetEccMode": 60}


def v100_pages() -> Scenario:
    facts = healthy(direct(machine(4, "Tesla V100-SXM2-32GB", "7.0", 32, 3), MESH4, 2))
    return facts | {"gpu.1.retired.0": 40, "gpu.1.retired.1": 22, "gpu.2.retired_pending": 1}


MESH4 = {(i, j): 2 for i in range(4) for j in range(i + 1, 4)}

ALL: dict[str, Callable[[], Scenario]] = {
    make.__name__: make
    for make in (
        dgx_a100, hgx_h100, dgx2_unprintable, v100_cube, a100_bridges, rtx_4090, l40s, gb200_tray, mig, wsl, gpu_lost,
        gpu_lost_later, link_down, bridge_link_down, link_state_unknown, fabric_not_ready, hangs, no_driver_loaded,
        version_mismatch, no_gpu, link_down_here, half_links, half_links_hidden, slow_link, link_errors, lost,
        lost_while_asked, ecc_error, remap_pending, remap_failed, throttled, power_capped, hot, xid, leftovers,
        narrow_slot, fabric_waits, no_p2p, mig_on, vgpu, slow_to_answer, v100_pages,
    )
}  # fmt: skip
