"""The PCIe link of one GPU, as the real pynvml binding reads it from the stub driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "nvml_stub"))
import scenarios

UUID = "GPU-00000003-0000-0000-0000-000000000000"
READ = """
import json, sys
from clusterrun.measure.pcie import PcieLink
link = PcieLink(sys.argv[1])
print(json.dumps([*link.now(), link.problem]))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scenarios.build(tmp_path_factory.mktemp("nvml_pcie"))


def read(driver: Path | None, scenario: scenarios.Scenario, place: Path, uuid: str = UUID) -> list[object]:
    scenarios.write(scenario, place / "scenario")
    env = {**os.environ, "NVML_STUB_SCENARIO": str(place / "scenario")}
    env["LD_LIBRARY_PATH"] = str(driver or place)
    done = subprocess.run([sys.executable, "-c", READ, uuid], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


def test_the_gpu_that_was_asked_for(driver: Path, tmp_path: Path) -> None:
    busy = scenarios.hgx_h100() | {"gpu.3.pcie_gen": 5, "gpu.3.pcie_width": 8}
    assert read(driver, busy, tmp_path) == [5, 8, ""]


def test_what_is_not_known_is_said(driver: Path, tmp_path: Path) -> None:
    h100 = scenarios.hgx_h100()
    assert read(driver, h100, tmp_path, "GPU-nobody") == [None, None, "NVML does not know GPU-nobody"]
    assert "does not say which GPU" in str(read(driver, h100, tmp_path, "")[2])
    silent = {key: value for key, value in h100.items() if key != "gpu.3.pcie_gen"}
    assert read(driver, silent, tmp_path)[2] == "NVML does not say"
    assert "no NVIDIA driver" in str(read(None, h100, tmp_path)[2])
