"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clusterrun import cli


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background with SIGINT ignored, and with it all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory (no ./conf), a home and a shared directory of the test's own."""
    for name in ("work", "home", "shared"):
        (tmp_path / name).mkdir()
    for name in [
        n
        for n in os.environ
        if n.startswith(("CLUSTERRUN_", "SLURM_", "SBATCH_", "SUBMITIT_", "NCCL_", "TORCH_", "GLOO_", "OMP_"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLUSTERRUN_SHARED_DIR", str(tmp_path / "shared"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def clusterrun_cli(place: Path) -> Callable[..., Ended]:
    """The real command in a process of its own."""

    def run(*arguments: str, env: dict[str, str] | None = None, timeout_s: float = 60) -> Ended:
        argv = [sys.executable, "-m", "clusterrun", *arguments]
        done = subprocess.run(
            argv, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def clusterrun_here(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command in this process: the same code, without the start of an interpreter."""

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        try:
            code: object = cli.main(list(arguments))
        except SystemExit as end:  # Hydra's --help and --version
            code = end.code or 0
        finally:
            gc.enable()
        assert isinstance(code, int), code
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def lab() -> Path:
    """The Slurm lab's script, with 4 healthy hosts of 8 GPUs behind it. One that can't come up is a failure, no skip.

    It stays up: scripts/test takes it down again when it was not up before.
    """
    script = Path(__file__).parents[1] / "scripts" / "slurm_lab"
    argv = [sys.executable, str(script), "up", "--nodes", "4", "--gpus", "8"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return script


@pytest.fixture(scope="session")
def nfs_lab_up() -> Iterator[None]:
    """An NFS server and two guests that are its clients. A lab that can't come up is a failure, no skip.

    There is one on a machine, and the tests break it: another session of tests waits.
    """
    with open("/run/clusterrun-nfs-lab.tests.lock", "w") as lock:
        end = time.monotonic() + 240
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < end, "another session of tests has been using the NFS lab for 4 minutes"
                time.sleep(1)
        nfs_lab_command("down")  # what an earlier run left in the exports would be found
        nfs_lab_command("up")
        yield


@pytest.fixture
def nfs_lab(nfs_lab_up: None) -> Iterator[None]:
    """The NFS lab; what the test broke is repaired after it. It stays up, as the Slurm lab does."""
    yield
    nfs_lab_command("up")


def nfs_lab_command(verb: str) -> None:
    script = Path(__file__).parents[1] / "scripts" / "nfs_lab"
    done = subprocess.run([sys.executable, str(script), verb], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
