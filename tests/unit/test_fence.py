"""The fence between attempts, and what a zombie can't do behind it."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from clusterrun.checkpoint.manifest import FileRecord, Manifest, hash_stream
from clusterrun.checkpoint.retention import Keep
from clusterrun.checkpoint.store import Store
from clusterrun.fence import NONCE, Claim, Fence, FencedError, guard


@pytest.fixture
def fence(tmp_path: Path) -> Fence:
    return Fence(tmp_path / "fence.json")


def test_the_last_to_take_it_holds_it(fence: Fence) -> None:
    first = fence.take(1)
    fence.check(first)
    second = fence.take(2)
    assert fence.holder() == second
    fence.check(second)
    with pytest.raises(FencedError, match=r"attempt 1 may no longer write .*: attempt 2 has taken its place"):
        fence.check(first)


def test_the_same_number_with_another_nonce_is_another_attempt(fence: Fence) -> None:
    """Two conductors can come to the same number, when the ledger of one was not seen by the other."""
    one, other = fence.take(3), fence.take(3)
    fence.check(other)
    with pytest.raises(FencedError):
        fence.check(one)


def test_inode_and_size_stay(fence: Fence) -> None:
    """So that an open file handle, and an NFS client's, never points at a removed file."""
    fence.take(1)
    before = fence.path.stat()
    fence.take(10**9)
    after = fence.path.stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    assert after.st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"attempt": 1}', b"\0" * 120])
def test_unreadable_is_neither_yes_nor_no(fence: Fence, content: bytes | None) -> None:
    if content is not None:
        fence.path.write_bytes(content)
    with pytest.raises(OSError, match=r"fence\.json"):
        fence.check(Claim(1, "x"))


def test_reading_while_it_is_taken_again_and_again(fence: Fence) -> None:
    fence.take(0)
    stop = multiprocessing.get_context("fork").Event()
    writer = multiprocessing.get_context("fork").Process(target=take_on, args=(fence, stop))
    writer.start()
    try:
        seen = set()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            seen.add(fence.holder().attempt)
    finally:
        stop.set()
        writer.join()
    assert len(seen) > 3


def take_on(fence: Fence, stop: Event) -> None:
    number = 0
    while not stop.is_set():
        fence.take(number := number + 1)


def test_workers_know_their_nonce_from_the_environment(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    guard(fence.path, 1)()  # outside a run there is nothing to check
    monkeypatch.setenv(NONCE, fence.take(1).nonce)
    check = guard(fence.path, 1)
    check()
    with pytest.raises(FencedError):
        guard(fence.path, 2)()
    fence.take(2)
    with pytest.raises(FencedError):
        check()


def test_a_zombie_publishes_retires_and_sets_aside_nothing(fence: Fence, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    claim = fence.take(1)
    store = Store(directory, guard=lambda: fence.check(claim))
    for step in (10, 20, 30):
        publish(store, step)
    temporary, manifest = write(store, 40)
    before = sorted(os.listdir(directory))
    fence.take(2)
    with pytest.raises(FencedError):
        store.publish(temporary, manifest, print)
    with pytest.raises(FencedError):
        store.retain(Keep(last=2), print)
    with pytest.raises(FencedError):
        store.set_aside(store.list()[0])
    assert sorted(os.listdir(directory)) == before


def write(store: Store, step: int) -> tuple[Path, Manifest]:
    temporary, nonce = store.new_temporary(step, 1)
    (temporary / "data").write_bytes(b"x" * step)
    with (temporary / "data").open("rb") as stream:
        size, digest = hash_stream(stream)
    files = (FileRecord("data", size, digest),)
    return temporary, Manifest(step, 1, 1, nonce, "c", time.time(), {}, {}, files)


def publish(store: Store, step: int) -> None:
    store.publish(*write(store, step), print)
