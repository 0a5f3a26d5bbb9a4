"""Saving and resuming through DCP over real Gloo ranks, with faults injected into one of them."""

from __future__ import annotations

import errno
import io
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clusterrun.checkpoint import dcp
from clusterrun.checkpoint.manifest import MANIFEST
from clusterrun.checkpoint.retention import Keep
from clusterrun.checkpoint.state import Checkpointer, Saved
from clusterrun.checkpoint.store import Store
from clusterrun.errors import CheckpointError
from ranks import both, leftovers, run_ranks

TIMEOUT_S = 3.0
WRONG: list[str] = []


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpointer(directory: Path, warnings: list[str] = WRONG) -> Checkpointer:
    return Checkpointer(
        store=Store(directory, patience_s=0),
        attempt=0,
        config_hash="c0ffee",
        keep=Keep(3),
        timeout_s=TIMEOUT_S,
        device=torch.device("cpu"),
        warn=warnings.append,
    )


def tensors(value: float = 1.0) -> dict[str, Any]:
    """Equal on all ranks."""
    return {
        "model/a": torch.arange(50_000, dtype=torch.float32) * value,
        "model/b": torch.full((3, 4), value, dtype=torch.bfloat16),
    }


def own(rank: int) -> dict[str, Any]:
    return {f"rng/rank{rank}/torch": torch.full((10,), rank, dtype=torch.uint8)}


def test_round_trip_of_every_type_and_shape(tmp_path: Path, alone: None) -> None:
    saved: dict[str, Any] = {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.tensor([], dtype=torch.int64),
        "view": torch.arange(12.0).reshape(3, 4).t(),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "half": torch.randn(5, dtype=torch.float16),
        "extra": {"note": "from get_extra_state", "numbers": [1, 2]},
    }
    assert checkpointer(tmp_path).save(3, saved, {"epoch": 0}).ok
    found = checkpointer(tmp_path).find()
    assert found is not None
    layout = dcp.layout(found.path)
    loaded: dict[str, Any] = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in layout.items()}
    loaded["extra"] = None
    dcp.read(loaded, found.path)
    assert loaded.pop("extra") == saved.pop("extra")
    for key, value in saved.items():
        assert loaded[key].numpy().tobytes() == value.contiguous().numpy().tobytes(), key


def test_what_does_not_fit_is_named(tmp_path: Path, alone: None) -> None:
    checkpointer(tmp_path).save(3, {"model/a": torch.ones(2)}, {})
    (info,) = Store(tmp_path).list()
    with pytest.raises(CheckpointError, match=r"does not fit this model: Missing key.*model/b"):
        dcp.read({"model/b": torch.ones(2)}, info.path)
    with pytest.raises(CheckpointError, match="does not fit this model: Size mismatch"):
        dcp.read({"model/a": torch.ones(3)}, info.path)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch /tmp/clusterrun-was-tricked",)


def test_pickle_in_the_metadata_is_not_run(tmp_path: Path, alone: None) -> None:
    checkpointer(tmp_path).save(3, {"model/a": torch.ones(2)}, {})
    (info,) = Store(tmp_path).list()
    (info.path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"asks for (posix|os)\.system, which is not part of a checkpoint"):
        dcp.layout(info.path)
    with pytest.raises(CheckpointError):
        dcp.read({"model/a": torch.ones(2)}, info.path)
    assert not Path("/tmp/clusterrun-was-tricked").exists()


@pytest.mark.parametrize("what", [dict, print, torch.load, torch.nn.Linear])
def test_the_metadata_may_hold_only_its_own_classes(tmp_path: Path, what: Any) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(what))
    with pytest.raises(CheckpointError, match="not part of a checkpoint"):
        dcp.layout(tmp_path)


def test_pickle_in_an_entry_is_not_run(tmp_path: Path, alone: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        evil = io.BytesIO()
        torch.save(Evil(), evil)
        patch.setattr(torch, "save", lambda what, stream, *a, **k: stream.write(evil.getvalue()))
        assert checkpointer(tmp_path).save(3, {"extra": 1}, {}).ok
    (info,) = Store(tmp_path).list()
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        dcp.read({"extra": None}, info.path)
    assert not Path("/tmp/clusterrun-was-tricked").exists()


def test_an_existing_file_is_never_overwritten(tmp_path: Path, alone: None) -> None:
    (tmp_path / "__0_0.distcp").write_text("precious")
    with pytest.raises(BaseException, match="File exists"):
        dcp.write({"model/a": torch.ones(2)}, tmp_path, dist.distributed_c10d._get_default_group())
    assert (tmp_path / "__0_0.distcp").read_text() == "precious"


# Several ranks.


def save_and_find(rank: int, directory: Path) -> None:
    save = checkpointer(directory).save(100, tensors(), {"epoch": 2, "scaler": {"scale": 0.1}}, own(rank))
    assert save.ok
    assert save.bytes > 200_000
    assert len(set(both((save.step, save.path, save.bytes)))) == 1
    found = checkpointer(directory).find()
    assert found is not None
    assert found.manifest is not None
    assert found.manifest.world_size == 3
    assert found.manifest.trainer == {"epoch": 2, "scaler": {"scale": 0.1}}
    layout = dcp.layout(found.path)
    assert {f"rng/rank{r}/torch" for r in range(3)} <= set(layout)
    loaded = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in layout.items()}
    dcp.read(loaded, found.path)
    assert all(torch.equal(value, loaded[key]) for key, value in {**tensors(), **own(rank)}.items())


def disk_full_on_one_rank(rank: int, directory: Path) -> None:
    warnings: list[str] = []
    saver = checkpointer(directory, warnings)
    assert saver.save(1, tensors(), {}, own(rank)).ok
    calls = []

    def full(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "fsync", full)
        failed = saver.save(2, tensors(), {}, own(rank))
    assert len(calls) == (1 if rank == 1 else 0)  # never repeated
    both(None)
    assert not failed.ok
    assert failed.problem is not None
    assert failed.problem.startswith("rank 1: ")
    assert failed.problem.endswith("__1_0.distcp: No space left on device")
    assert both(leftovers(directory)) == [[]] * 3
    if rank == 0:
        assert warnings == [f"the checkpoint of step 2 is not saved: {failed.problem}; training goes on"]
    assert saver.save(3, tensors(), {}, own(rank)).ok
    assert [info.step for info in saver.store.list()] == [3, 1]


def publishing_fails(rank: int, directory: Path) -> None:
    saver = checkpointer(directory, [])
    assert saver.save(1, tensors(), {}, own(rank)).ok
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(Store, "publish", lambda *a: (_ for _ in ()).throw(OSError(errno.EDQUOT, "Quota exceeded")))
        failed = saver.save(2, tensors(), {}, own(rank))
    both(None)
    assert not failed.ok
    assert both(leftovers(directory)) == [[]] * 3
    assert both([info.step for info in saver.store.list()]) == [[1]] * 3
    assert saver.save(3, tensors(), {}, own(rank)).ok


def one_rank_is_too_slow(rank: int, directory: Path) -> None:
    """Longer than the time limit in fsync, as on a stalled NFS server: no checkpoint, but the ranks go on together."""
    saver = checkpointer(directory, [])
    fsync = os.fsync

    def slow(fd: int) -> None:
        time.sleep(TIMEOUT_S * 2)
        fsync(fd)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "fsync", slow)
        began = time.monotonic()
        failed: Saved = saver.save(2, tensors(), {}, own(rank))
    assert time.monotonic() - began < TIMEOUT_S * 6
    assert both(failed.ok) == [False] * 3
    assert saver.save(3, tensors(), {}, own(rank)).ok
    assert [info.step for info in saver.store.list()] == [3]


def the_newest_is_damaged(rank: int, directory: Path) -> None:
    warnings: list[str] = []
    saver = checkpointer(directory, warnings)
    for step in (1, 2, 3):
        assert saver.save(step, tensors(step), {}, own(rank)).ok
    if rank == 0:
        file = directory / "step-00000003" / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        (directory / "step-00000002" / MANIFEST).unlink()
    both(None)
    found = saver.find()
    assert found is not None
    assert found.step == 1
    assert both(len(leftovers(directory))) == [2] * 3
    if rank == 0:
        assert "__1_0.distcp: damaged" in warnings[0]
        assert "step-00000003 is set aside as .bad-step-00000003-" in warnings[0]
        assert f"{MANIFEST}: can't be read" in warnings[1]


def none_is_valid(rank: int, directory: Path) -> None:
    """Also when asked again, when nothing but what was set aside is left: never start from step 0 in silence."""
    saver = checkpointer(directory, [])
    assert saver.find() is None
    assert saver.save(1, tensors(), {}, own(rank)).ok
    if rank == 0:
        (directory / "step-00000001" / ".metadata").write_bytes(b"")
    both(None)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none is valid.*begin again from step 0"):
            saver.find()


def test_scenarios(tmp_path: Path) -> None:
    scenarios = [
        save_and_find,
        disk_full_on_one_rank,
        publishing_fails,
        the_newest_is_damaged,
        none_is_valid,
        one_rank_is_too_slow,
    ]
    run_ranks(3, tmp_path, scenarios)


def a_rank_dies_while_saving(rank: int, directory: Path) -> None:
    saver = checkpointer(directory, [])
    if rank == 1:
        os.fsync = lambda fd: os._exit(0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        saver.save(1, tensors(), {}, own(rank))
    assert time.monotonic() - began < 30
    assert saver.store.list() == []


def test_a_dead_rank_does_not_hang_the_others(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, [a_rank_dies_while_saving])
