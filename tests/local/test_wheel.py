"""The wheel as users get it: installed in an environment of its own and called from another directory."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a fresh environment. Dependencies come from the one that runs the tests, clusterrun does not."""
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT)], check=True, timeout=200)
    venv.create(place / "venv", with_pip=False)
    site = place / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # A .pth file inside this directory is not read, so the editable install of the tests stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "venv" / "bin" / "python"


def run(python: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERRUN_", "PYTHON"))}
    return subprocess.run(
        [str(python), "-m", "clusterrun", *arguments],
        cwd=cwd,
        env={**env, "CLUSTERRUN_SHARED_DIR": str(cwd / "shared"), "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_it_is_the_installed_one(installed: Path, tmp_path: Path) -> None:
    code = "import clusterrun, clusterrun.conf; print(clusterrun.__file__, clusterrun.conf.__file__)"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run([str(installed), "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    package, conf = done.stdout.split()
    assert package.startswith(str(installed.parents[1]))
    assert conf.startswith(str(installed.parents[1]))


def test_it_finds_its_configs(installed: Path, tmp_path: Path) -> None:
    for cluster in ("laptop", "lab", "a100_nvswitch", "h100_nvswitch_ib", "a100_pcie", "l40s_pcie"):
        where = "cluster.shared_dir=/srv/shared"
        done = run(installed, tmp_path, "plan", f"cluster={cluster}", where)
        assert done.returncode == 0, done.stderr
        assert f"ddp_linear-{cluster}-" in done.stdout
    done = run(installed, tmp_path, "--help")
    assert done.returncode == 0
    assert "train: ddp_linear, ddp_mlp, gpt, script" in done.stdout


def test_it_trains(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "train=ddp_linear", "train.max_steps=5", "cluster.nodes=1", "run_id=wheel")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wheel: done" in done.stdout
