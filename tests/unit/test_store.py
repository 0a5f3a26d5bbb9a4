"""The checkpoint directory: publishing, finding, verifying, retaining, with faults injected. No torch."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterrun.checkpoint.manifest import MANIFEST, FileRecord, Manifest, hash_stream, share
from clusterrun.checkpoint.retention import Keep
from clusterrun.checkpoint.store import LATEST, CheckpointInfo, Store, step_name
from clusterrun.errors import CheckpointError

FILES = {"__0_0.distcp": b"weights" * 100, "__1_0.distcp": b"more" * 50, ".metadata": b"layout"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", patience_s=0)


@pytest.fixture
def warnings() -> list[str]:
    return []


def write(store: Store, step: int, attempt: int = 0) -> tuple[Path, Manifest]:
    """A temporary directory as the ranks leave it for rank 0 to publish."""
    temporary, nonce = store.new_temporary(step, attempt)
    records = []
    for name, content in FILES.items():
        (temporary / name).write_bytes(content)
        with (temporary / name).open("rb") as stream:
            records.append(FileRecord(name, *hash_stream(stream)))
    manifest = Manifest(
        step=step,
        world_size=2,
        attempt=attempt,
        nonce=nonce,
        config_hash="c0ffee",
        created=time.time(),
        versions={"torch": "2"},
        trainer={"epoch": 1, "consumed": 64, "scaler": {"scale": 65536.0}},
        files=tuple(records),
    )
    return temporary, manifest


def save(store: Store, step: int, attempt: int = 0) -> CheckpointInfo:
    return store.publish(*write(store, step, attempt), warn=lambda text: None)


def names(store: Store) -> list[str]:
    return sorted(os.listdir(store.directory))


def fail(error: int) -> Callable[..., Any]:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise OSError(error, os.strerror(error))

    return failing


def test_publishing_and_listing(store: Store) -> None:
    assert store.list() == []
    assert store.latest_step() is None
    assert not store.has_remains()
    for step in (5, 100, 20):
        save(store, step)
    assert [info.step for info in store.list()] == [100, 20, 5]
    assert store.latest_step() == 100
    newest = store.list()[0]
    assert newest.bytes == sum(map(len, FILES.values()))
    assert newest.created == pytest.approx(time.time(), abs=60)
    assert newest.manifest is not None
    assert newest.manifest.trainer["scaler"] == {"scale": 65536.0}
    assert store.verify(newest) == []
    assert names(store) == [LATEST, "step-00000005", "step-00000020", "step-00000100"]
    assert (store.directory / LATEST).read_text() == "step-00000020\n"  # the one written last; a hint only


def test_private_permissions(store: Store) -> None:
    info = save(store, 1)
    assert store.directory.stat().st_mode & 0o777 == 0o700
    assert info.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "gone"])
def test_damage_of_every_file_is_found(store: Store, name: str, damage: str) -> None:
    info = save(store, 7)
    file = info.path / name
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        if damage == "flip":
            content[len(content) // 2] ^= 0x10
        file.write_bytes(content[:-2] if damage == "cut" else content + b"x" * (damage == "grow"))
    (found,) = store.list()
    problems = store.verify(found)
    assert len(problems) == 1
    assert name in problems[0]
    assert store.looks_whole(found) == (damage == "flip" and name != MANIFEST)


def test_every_bit_of_the_manifest_counts(store: Store) -> None:
    info = save(store, 7)
    file = info.path / MANIFEST
    good = file.read_bytes()
    survived = []
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1
        file.write_bytes(bad)
        (found,) = store.list()
        if found.manifest is not None and found.manifest != info.manifest:
            survived.append(position)
    assert not survived


def test_a_manifest_of_another_step_is_not_trusted(store: Store) -> None:
    save(store, 7).path.rename(store.directory / step_name(8))
    (found,) = store.list()
    assert found.manifest is None
    assert "is of step 7" in store.verify(found)[0]


def test_names_are_matched_exactly(store: Store) -> None:
    for step in range(1, 6):
        save(store, step)
    others = ["step-00000100.backup", "step-100", "xstep-00000100", "step-0000000100", ".tmp-step-1-notours", "mine"]
    for name in others:
        (store.directory / name).mkdir()
        (store.directory / name / "precious").touch()
    store.retain(Keep(2), warn=pytest.fail)
    store.remove_stale_temporaries(99)
    assert [info.step for info in store.list()] == [5, 4]
    assert all((store.directory / name / "precious").exists() for name in others)


@pytest.mark.parametrize(
    ("keep", "left"), [(3, [5, 4, 3]), (2, [5, 4]), (1, [5, 4]), (0, [5, 4]), (9, [5, 4, 3, 2, 1])]
)
def test_retention_keeps_at_least_two(store: Store, keep: int, left: list[int]) -> None:
    for step in range(1, 6):
        save(store, step)
    removed = store.retain(Keep(keep), warn=pytest.fail)
    assert [info.step for info in store.list()] == left
    assert sorted([info.step for info in removed] + left) == [1, 2, 3, 4, 5]
    assert not [name for name in names(store) if name.startswith(".")]


def test_retention_counts_only_what_looks_whole(store: Store) -> None:
    for step in range(1, 6):
        save(store, step)
    (store.directory / step_name(5) / MANIFEST).write_text("{}")
    (store.directory / step_name(4) / "__0_0.distcp").write_bytes(b"")
    store.retain(Keep(2), warn=pytest.fail)
    assert [info.step for info in store.list()] == [5, 4, 3, 2]
    assert store.latest_step() == 3


def test_retention_never_raises(store: Store, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    for step in range(1, 5):
        save(store, step)
    monkeypatch.setattr(os, "rename", fail(errno.EACCES))
    assert store.retain(Keep(2), warnings.append) == []
    assert len(warnings) == 2
    assert len(store.list()) == 4


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failing_disk_publishes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, error: int, warnings: list[str]
) -> None:
    save(store, 1)
    temporary, manifest = write(store, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail(error))
        with pytest.raises(OSError, match=os.strerror(error)):
            store.publish(temporary, manifest, warnings.append)
    store.discard(temporary)
    assert names(store) == [LATEST, "step-00000001"]
    assert store.verify(store.list()[0]) == []
    assert save(store, 2).step == 2


def test_a_failed_fsync_is_not_repeated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, manifest = write(store, 2)
    calls = []

    def failing(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="broken"):
        store.publish(temporary, manifest, pytest.fail)
    assert len(calls) == 1


def test_latest_is_only_a_hint(store: Store, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    temporary, manifest = write(store, 2)
    monkeypatch.setattr(os, "replace", fail(errno.ENOSPC))
    info = store.publish(temporary, manifest, warnings.append)
    assert store.verify(info) == []
    assert "only a hint" in warnings[0]


def test_a_valid_checkpoint_of_the_step_stays(store: Store) -> None:
    first = save(store, 3)
    before = (first.path / MANIFEST).read_text()
    again = save(store, 3, attempt=1)
    assert again.manifest == first.manifest
    assert (first.path / MANIFEST).read_text() == before
    assert names(store) == [LATEST, "step-00000003"]


def test_an_invalid_one_of_the_step_is_set_aside(store: Store, warnings: list[str]) -> None:
    (save(store, 3).path / "__1_0.distcp").write_bytes(b"")
    info = store.publish(*write(store, 3, attempt=1), warn=warnings.append)
    assert store.verify(info) == []
    assert info.manifest is not None
    assert info.manifest.attempt == 1
    assert [name for name in names(store) if name.startswith(".bad-step-00000003-")]
    assert "set aside" in warnings[0]


def test_a_rename_that_nfs_repeated_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try went through, its answer was lost, and the repeated one finds nothing to rename."""
    rename = os.rename

    def repeated(source: Path, target: Path) -> None:
        rename(source, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    temporary, manifest = write(store, 4)
    monkeypatch.setattr(os, "rename", repeated)
    assert store.publish(temporary, manifest, pytest.fail).step == 4


def test_two_attempts_writing_at_once(store: Store) -> None:
    """A worker that its node forgot to kill writes the same step: the later one finds it there, which is success."""
    one, other = write(store, 10, attempt=0), write(store, 10, attempt=1)
    assert one[0] != other[0]
    first = store.publish(*one, warn=pytest.fail)
    second = store.publish(*other, warn=pytest.fail)
    assert second.manifest == first.manifest
    assert names(store) == [LATEST, "step-00000010"]


def test_leftovers_of_this_and_earlier_attempts_are_removed(store: Store) -> None:
    old, same, later = (store.new_temporary(5, attempt)[0] for attempt in (1, 2, 3))
    store.remove_stale_temporaries(2)
    assert not old.exists()
    assert not same.exists()  # torchrun started the workers anew
    assert later.exists()
    assert not store.has_remains()  # unfinished ones are no checkpoints


def test_a_set_aside_checkpoint_still_forbids_a_fresh_start(store: Store) -> None:
    store.set_aside(save(store, 3))
    assert store.list() == []
    assert store.latest_step() is None
    assert store.has_remains()


def test_setting_aside_that_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    info = save(store, 3)
    monkeypatch.setattr(os, "rename", fail(errno.EROFS))
    with pytest.raises(CheckpointError, match="can't be set aside"):
        store.set_aside(info)


def test_a_young_checkpoints_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, patience_s=20)
    info = save(store, 1)
    hidden = tmp_path / "hidden"
    (info.path / "__0_0.distcp").rename(hidden)
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            hidden.rename(info.path / "__0_0.distcp")

    monkeypatch.setattr(time, "sleep", nap)
    assert store.verify(info) == []
    assert len(naps) == 2


def test_an_old_checkpoints_file_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, patience_s=20)
    info = save(store, 1)
    (info.path / "__0_0.distcp").unlink()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    monkeypatch.setattr(time, "sleep", pytest.fail)
    assert "No such file" in store.verify(info)[0]


def test_a_manifest_of_another_format(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterrun.checkpoint.manifest.FORMAT", 2)
    info = save(store, 1)
    monkeypatch.undo()
    assert "another version" in store.verify(store.list()[0])[0]
    assert info.manifest is not None


@pytest.mark.parametrize("text", ["", "null", "[]", "[1]", '"x"', "{}", '{"digest": 3}', '{"digest": "x", "step": 1}'])
def test_what_is_no_manifest(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=r"manifest|damaged"):
        Manifest.from_json(text, tmp_path)


def test_hashing_is_shared_evenly() -> None:
    records = [FileRecord(str(size), size, "") for size in (50, 40, 30, 20, 10)]
    parts = [share(records, part, 3) for part in range(3)]
    assert sorted(record.size for part in parts for record in part) == [10, 20, 30, 40, 50]
    assert max(sum(record.size for record in part) for part in parts) == 50
