"""``clusterrun checkpoints`` and ``clusterrun export``, on a run directory with real checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from clusterrun.checkpoint import export
from clusterrun.checkpoint.retention import Keep
from clusterrun.checkpoint.state import Checkpointer
from clusterrun.checkpoint.store import Store
from clusterrun.errors import CheckpointError, ConfigError
from clusterrun.rundir import RunDir
from conftest import Ended

WEIGHTS: dict[str, Any] = {
    "layer.weight": torch.arange(12.0).reshape(3, 4).t(),
    "layer.bias": torch.tensor([float("nan"), -0.0]),
    "half": torch.randn(5, dtype=torch.bfloat16),
    "count": torch.tensor(3),
}


@pytest.fixture
def run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with checkpoints of steps 10, 20 and 30."""
    made = RunDir.create(place / "shared", "some-run-1234")
    made.config.touch()
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    saver = Checkpointer(Store(made.checkpoints, 0), 2, "", Keep(3), 60, torch.device("cpu"), pytest.fail)
    for step in (10, 20, 30):
        entries: dict[str, Any] = {f"model/{key}": value + step for key, value in WEIGHTS.items()}
        assert saver.save(step, {**entries, "model/extra": {"a": 1}, "optim/x": torch.ones(9)}, {}).ok
    dist.destroy_process_group()
    return made


def damage(run: RunDir, step: int) -> Path:
    file = run.checkpoints / f"step-{step:08d}" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_listing(run: RunDir, clusterrun_here: Callable[..., Ended]) -> None:
    done = clusterrun_here("checkpoints", "some-run")
    assert done.code == 0
    rows = [line.split() for line in done.stdout.splitlines()[2:5]]
    assert [(row[0], row[-1]) for row in rows] == [("30", "whole"), ("20", "whole"), ("10", "whole")]
    assert "--verify reads every file" in done.stdout
    verified = clusterrun_here("checkpoints", "some-run", "--verify", "--json")
    assert verified.code == 0
    lines = json.loads(verified.stdout)
    assert [(line["step"], line["verdict"], line["attempt"]) for line in lines] == [
        (step, "verified", 2) for step in (30, 20, 10)
    ]
    size = sum(f.stat().st_size for f in (run.checkpoints / "step-00000030").iterdir() if f.name != "MANIFEST.json")
    assert lines[0]["bytes"] == size
    assert 0 <= lines[0]["age_s"] < 600


def test_a_flipped_bit_shows_only_when_it_is_looked_for(run: RunDir, clusterrun_here: Callable[..., Ended]) -> None:
    file = damage(run, 20)
    assert clusterrun_here("checkpoints", "some-run").code == 0
    done = clusterrun_here("checkpoints", "some-run", "--verify")
    assert done.code == 1
    assert f"{file}: damaged, its digest is not the manifest's" in done.stdout
    file.write_bytes(b"")
    assert clusterrun_here("checkpoints", "some-run").code == 1  # its size is looked at in any case
    (run.checkpoints / "step-00000020").rename(run.checkpoints / ".bad-step-00000020-00c0ffee")
    done = clusterrun_here("checkpoints", "some-run", "--verify")
    assert done.code == 0
    assert "set aside" in done.stdout


def test_none(place: Path, clusterrun_here: Callable[..., Ended]) -> None:
    RunDir.create(place / "shared", "empty").config.touch()
    assert clusterrun_here("checkpoints", "empty").stdout.startswith("no checkpoints in ")
    assert clusterrun_here("checkpoints", "nothere").code == 2
    done = clusterrun_here("export", "empty", "-o", "x.pt")
    assert (done.code, os.listdir()) == (1, [])
    assert "no checkpoint in it" in done.stderr


def test_the_weights_in_both_formats(run: RunDir, clusterrun_here: Callable[..., Ended]) -> None:
    done = clusterrun_here("export", "some-run", "-o", "w.safetensors")
    assert done.code == 0, done.stderr
    assert "step 30, 4 tensors, 20 numbers" in done.stdout
    assert "left out, no tensor: extra" in done.stderr
    assert clusterrun_here("export", "some-run", "-o", "w.pt", "--step", "10").code == 0
    for file, step in (("w.safetensors", 30), ("w.pt", 10)):
        found = load_file(file) if step == 30 else torch.load(file, weights_only=True)
        assert found.keys() == WEIGHTS.keys()
        assert all(bits(found[key]) == bits(WEIGHTS[key] + step) for key in WEIGHTS)
    again = clusterrun_here("export", "some-run", "-o", "w.pt")
    assert again.code == 2
    assert "exists; give another name" in again.stderr
    assert sorted(os.listdir()) == ["w.pt", "w.safetensors"]


def test_a_damaged_one_is_never_exported(run: RunDir, clusterrun_here: Callable[..., Ended]) -> None:
    damage(run, 30)
    done = clusterrun_here("export", "some-run", "-o", "w.pt")
    assert done.code == 0
    assert "not taken" in done.stderr
    assert "step 20," in done.stdout
    done = clusterrun_here("export", "some-run", "-o", "w2.pt", "--step", "30")
    assert done.code == 1
    assert "nothing is exported" in done.stderr
    assert os.listdir() == ["w.pt"]
    assert "there are those of 30, 20, 10" in clusterrun_here("export", "some-run", "-o", "y.pt", "--step", "7").stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-o", "w"], "its name tells no format"),
        (["-o", "no/where/w.pt"], "no such directory"),
        (["--format", "torch"], "-o/--output"),
        (["-o", "w.pt", "--format", "onnx"], "invalid choice"),
    ],
)
def test_what_is_wrong(run: RunDir, clusterrun_here: Callable[..., Ended], arguments: list[str], says: str) -> None:
    done = clusterrun_here("export", "some-run", *arguments)
    assert done.code == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_safetensors(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'clusterrun\[safetensors\]'"):
        export.export(Store(run.checkpoints), None, export.Format.safetensors, Path("w.safetensors").absolute())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
@pytest.mark.parametrize("form", list(export.Format))
def test_a_full_disk_leaves_nothing(run: RunDir, tmp_path: Path, form: export.Format) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", small], check=True)
    try:
        (small / "others").write_bytes(bytes(8192))
        with pytest.raises(CheckpointError, match="can't be written"):
            export.export(Store(run.checkpoints), None, form, small / "w")
        assert sorted(os.listdir(small)) == ["others"]
    finally:
        subprocess.run(["umount", small], check=True)
