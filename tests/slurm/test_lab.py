"""The Slurm lab itself: everything else in this folder stands on it.

The fixture `lab` has brought it up with 4 nodes of 8 GPUs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slurm

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_lab"
UP = ("up", "--nodes", "4", "--gpus", "8")


def run_lab(*args: str, timeout: float = 90, **popen: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=timeout, **popen
    )


def output(*argv: str) -> list[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def status() -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run_lab("status", "--json").stdout)
    return report


@pytest.fixture
def healed_after(lab: object) -> Iterator[None]:
    yield
    assert run_lab(*UP).returncode == 0


@pytest.mark.usefixtures("lab")
def test_step_runs_on_hosts_of_different_names_and_addresses() -> None:
    assert sorted(output("srun", "-N4", "hostname")) == ["c1", "c2", "c3", "c4"]
    assert sorted(output("srun", "-N4", "hostname", "-I")) == [f"10.77.0.{host}" for host in range(11, 15)]


@pytest.mark.usefixtures("lab")
def test_step_sees_its_gpus_and_no_others() -> None:
    sees = output("srun", "-N2", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES")
    assert [len(devices.split(",")) for devices in sees] == [2, 2]


@pytest.mark.usefixtures("lab")
def test_look_up_of_an_unknown_address_fails_at_once() -> None:
    began = time.monotonic()
    assert output("srun", "-N1", "-wc1", "getent", "hosts", "10.77.0.12") == ["10.77.0.12", "c2"]
    with pytest.raises(subprocess.CalledProcessError):
        output("srun", "-N1", "-wc1", "getent", "hosts", "192.0.2.1")
    assert time.monotonic() - began < 5


@pytest.mark.usefixtures("lab")
def test_up_twice_changes_nothing_and_is_fast() -> None:
    before = status()
    began = time.monotonic()
    done = run_lab(*UP)
    assert time.monotonic() - began < 5
    assert done.returncode == 0, done.stderr
    assert "already up" in done.stdout
    pids = [node["slurmd_pid"] for node in before["nodes"]]
    assert [node["slurmd_pid"] for node in status()["nodes"]] == pids


@pytest.mark.usefixtures("lab")
def test_status_as_json() -> None:
    report = status()
    assert report["up"]
    assert report["healthy"]
    assert report["settings"]["nodes"] == 4
    assert report["settings"]["gpus"] == 8
    assert report["controller"]["answers"]
    assert [(node["name"], node["address"]) for node in report["nodes"]] == [
        (f"c{number}", f"10.77.0.{10 + number}") for number in range(1, 5)
    ]
    for node in report["nodes"]:
        assert node["cable"] == "up"
        assert Path(f"/proc/{node['slurmd_pid']}").exists()
        assert node["state"] in {"idle", "mixed", "allocated", "completing"}


@pytest.mark.usefixtures("healed_after")
def test_up_heals_a_killed_slurmd() -> None:
    killed = status()["nodes"][2]["slurmd_pid"]
    os.kill(killed, signal.SIGKILL)

    sick = run_lab("status")
    assert sick.returncode == 1
    assert "dead" in sick.stdout

    done = run_lab(*UP)
    assert done.returncode == 0, done.stderr
    assert "started slurmd on c3" in done.stdout
    assert status()["healthy"]
    assert status()["nodes"][2]["slurmd_pid"] not in {None, killed}
    assert output("srun", "-N1", "-wc3", "hostname") == ["c3"]


@pytest.mark.usefixtures("healed_after")
def test_up_heals_a_drained_node_a_pulled_cable_and_a_dead_controller() -> None:
    output("scontrol", "update", "NodeName=c4", "State=DRAIN", "Reason=test")
    for fault in (["cable-pull", "c2"], ["stop-slurmctld"]):
        assert run_lab("fault", *fault).returncode == 0
    assert run_lab("status").returncode == 1

    done = run_lab(*UP)
    assert done.returncode == 0, done.stderr
    assert sorted(output("srun", "-N4", "hostname")) == ["c1", "c2", "c3", "c4"]


SEND_4_MB = """
import os, socket, time
if os.uname().nodename == "c1":
    server = socket.create_server(("", 9099))
    began = time.monotonic()
    peer, _ = server.accept()
    while peer.recv(1 << 16):
        pass
    print(time.monotonic() - began)
else:
    for attempt in range(100):
        try:
            peer = socket.create_connection(("c1", 9099))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    peer.sendall(bytes(4_000_000))
    peer.close()
"""


def seconds_for_4_mb() -> float:
    return float(output("srun", "-N2", "-w", "c1,c2", sys.executable, "-c", SEND_4_MB)[0])


@pytest.mark.usefixtures("healed_after")
def test_a_link_of_low_rate_is_slow_until_unslowed() -> None:
    assert run_lab("fault", "slow", "c2", "--rate", "20mbit").returncode == 0
    assert seconds_for_4_mb() > 1.2  # 1.6 s without the burst that tbf allows
    assert run_lab("fault", "unslow", "c2").returncode == 0
    assert seconds_for_4_mb() < 1.2


@pytest.mark.usefixtures("healed_after")
def test_a_link_of_long_delay_is_slow() -> None:
    done = run_lab("fault", "slow", "c2", "--delay", "300ms")
    if "without netem" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert seconds_for_4_mb() > 1.2  # several round trips of 0.6 s, because TCP starts slowly


def test_unknown_node_is_one_clear_line(lab: object) -> None:
    done = run_lab("fault", "cable-pull", "c99")
    assert done.returncode == 2
    assert done.stderr == "slurm_lab: no node 'c99': they are c1 to c4\n"


def test_missing_packages_are_named_in_one_line() -> None:
    done = run_lab("up", env={"PATH": "/nonexistent"})
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "apt-get install" in line
    assert "slurmctld" in line
    assert "munge" in line


def test_not_root_is_said_in_one_line() -> None:
    nobody = 65534
    # The system's Python and a copy: nobody may be unable to read this one's home.
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        for file in (SCRIPT, SCRIPT.with_name("lab_commands.py")):
            shutil.copy(file, place)
        shutil.copytree(SCRIPT.with_name("slurm_lab_parts"), Path(place) / "slurm_lab_parts")
        done = subprocess.run(
            ["/usr/bin/python3", f"{place}/slurm_lab", "up"],
            capture_output=True,
            text=True,
            timeout=30,
            user=nobody,
            group=nobody,
            extra_groups=[],
            cwd="/",
        )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "not root" in line
