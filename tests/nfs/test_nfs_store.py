"""The checkpoint store on a real NFS: two kernel clients with their caches, a server that dies, cables, full disks.

After each fault the store holds the old or the new checkpoint, complete, on both clients, or the error is plain.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guests import EXPORTS, MOUNTS, Guest, lab, run

pytestmark = pytest.mark.nfs

AT_ONCE_S = 5.0  # far below the half minute for which NFS clients believe their caches


@pytest.fixture(scope="module")
def processes(nfs_lab_up: None) -> Iterator[dict[str, Guest]]:
    """One in each guest, for all tests: starting Python there takes seconds."""
    running = {name: Guest(name) for name in ("n1", "n2")}
    yield running
    for guest in running.values():
        guest.end()


def lend(processes: dict[str, Guest], name: str) -> Iterator[Guest]:
    yield processes[name]
    if not processes[name].is_idle:  # the test failed in the middle of something
        processes[name].end()
        processes[name] = Guest(name)


@pytest.fixture
def n1(processes: dict[str, Guest], nfs_lab: None) -> Iterator[Guest]:
    yield from lend(processes, "n1")


@pytest.fixture
def n2(processes: dict[str, Guest], nfs_lab: None) -> Iterator[Guest]:
    yield from lend(processes, "n2")


@pytest.fixture
def place(request: pytest.FixtureRequest, n1: Guest, n2: Guest) -> str:
    """A path on the export ``main`` where nothing is, as both guests have just seen: they remember that."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    path = str(MOUNTS / "main" / name)
    assert n1.ask("look", path=path) == n2.ask("look", path=path) == {"there": False}
    return path


def mounted(guest: str, options: str) -> Path:
    """The export ``main`` mounted another way in a guest."""
    point = Path("/run") / "".join(c if c.isalnum() else "-" for c in options)
    run(guest, "mkdir", "-p", str(point))
    run(guest, "mount", "-t", "nfs", "-o", options, "server:/main", str(point))
    return point


def on_server(place: str) -> set[str]:
    return set(os.listdir(EXPORTS / Path(place).relative_to(MOUNTS)))


def assert_published(answer: dict[str, Any], step: int) -> None:
    assert answer == {"step": step, "mine": True, "warnings": []}


def assert_chosen(guest: Guest, place: str, step: int | None, seconds: float = AT_ONCE_S) -> None:
    """A resume on this guest would take ``step``, whose files it has read, and finds nothing wrong with any newer."""
    answer = guest.ask("choose", directory=place)
    assert (answer["step"], answer["rejected"]) == (step, [])
    assert answer["seconds"] < seconds


def test_published_on_one_is_resumed_on_the_other_at_once(n1: Guest, n2: Guest, place: str) -> None:
    assert_chosen(n2, place, None)
    for step in range(1, 5):
        writer, reader = (n1, n2) if step % 2 else (n2, n1)
        assert reader.ask("look", path=f"{place}/step-{step:08d}/MANIFEST.json") == {"there": False}
        assert_published(writer.ask("publish", directory=place, step=step), step)
        assert_chosen(reader, place, step)


@pytest.mark.parametrize("options", ["vers=3,nolock", "vers=4.1"])
def test_other_versions_of_the_protocol_see_it_at_once_too(n1: Guest, n2: Guest, place: str, options: str) -> None:
    there = str(mounted("n2", options) / Path(place).name)
    assert_chosen(n2, there, None)
    for step in (1, 2):
        assert n2.ask("look", path=f"{there}/step-{step:08d}/MANIFEST.json") == {"there": False}
        assert_published(n1.ask("publish", directory=place, step=step), step)
        assert_chosen(n2, there, step)
    assert_published(n2.ask("publish", directory=there, step=3), 3)
    assert_chosen(n1, place, 3)


def test_with_nocto_a_resume_takes_an_old_checkpoint(n1: Guest, n2: Guest, place: str) -> None:
    """Why preflight warns of ``nocto``: nothing is damaged, but work is lost without a word."""
    assert_published(n1.ask("publish", directory=place, step=1), 1)
    there = str(mounted("n2", "vers=4.2,nocto") / Path(place).name)
    for _ in range(2):  # the second time it comes from the cache
        assert_chosen(n2, there, 1)
    assert_published(n1.ask("publish", directory=place, step=2), 2)
    assert_chosen(n2, there, 1)
    assert_chosen(n2, place, 2)


def restart_during(n1: Guest, at: tuple[str, str], do: str, **arguments: Any) -> dict[str, Any]:
    """Lose the answer to a system call that the server has done, by a power cut: the client must repeat the call."""
    n1.hold(do, at, **arguments)
    lab("fault", "mute", "n1")
    n1.go_on()
    time.sleep(0.5)
    lab("fault", "stop-server")
    lab("fault", "unmute", "n1")
    lab("fault", "start-server")
    return n1.answer()


@pytest.mark.parametrize(
    "at", [("os.mkdir", ".tmp-step"), ("open", "MANIFEST"), ("os.rename", "/step-")], ids=lambda at: at[0]
)
def test_server_restarted_in_a_publish(n1: Guest, n2: Guest, place: str, at: tuple[str, str]) -> None:
    assert_published(n1.ask("publish", directory=place, step=1), 1)
    assert_published(restart_during(n1, at, "publish", directory=place, step=2), 2)
    assert on_server(place) == {"step-00000001", "step-00000002", "LATEST"}
    assert_chosen(n2, place, 2)
    assert_chosen(n1, place, 2)


def test_server_restarted_in_a_renaming(n1: Guest, n2: Guest, place: str) -> None:
    for step in range(1, 5):
        assert_published(n1.ask("publish", directory=place, step=step), step)
    answer = restart_during(n1, ("os.rename", ".trash"), "retain", directory=place, last=2)
    assert answer == {"removed": [2, 1], "warnings": []}
    answer = restart_during(n1, ("os.rename", ".bad"), "set_aside", directory=place, step=4)
    assert on_server(place) == {"step-00000003", answer["name"], "LATEST"}
    assert_chosen(n2, place, 3)


def test_server_gone_while_data_is_written(n1: Guest, n2: Guest, place: str) -> None:
    assert_published(n1.ask("publish", directory=place, step=1), 1)
    n1.hold("publish", ("open", "__1_0"), directory=place, step=2, mib=48)
    n1.go_on()
    lab("fault", "stop-server")
    time.sleep(1)
    assert not n1.answered(), "a hard mount waits for its server"
    lab("fault", "start-server")
    assert_published(n1.answer(), 2)
    assert_chosen(n2, place, 2)


CUT_S = 5.7  # TCP tries again after 6.2 s, then only after 12.6: the next calls come soon after the plugging


def test_cable_cut_and_back(n1: Guest, n2: Guest, place: str) -> None:
    assert_published(n1.ask("publish", directory=place, step=1), 1)
    n1.hold("publish", ("open", "__1_0"), directory=place, step=2, mib=4)
    lab("fault", "cable-pull", "n1")
    n1.go_on()
    time.sleep(CUT_S)
    assert not n1.answered()
    assert_chosen(n2, place, 1)
    lab("fault", "cable-plug", "n1")
    assert_published(n1.answer(), 2)
    assert_chosen(n2, place, 2)


def test_a_process_that_waits_for_a_dead_server_can_be_killed(n2: Guest, place: str) -> None:
    """Slurm ends jobs so; a node whose processes can't be ended would be lost until a reboot."""
    with Guest("n1") as doomed:
        assert_published(doomed.ask("publish", directory=place, step=1), 1)
        doomed.hold("publish", ("os.rename", "/step-"), directory=place, step=2)
        lab("fault", "cable-pull", "n1")
        doomed.go_on()
        time.sleep(1)
        assert not doomed.answered()
    end = time.monotonic() + 10
    while "in_guest.py" in (left := run("n1", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).replace(
        str(Path(__file__).with_name("in_guest.py")), "", 1
    ):  # the first is the module's own process in n1
        assert time.monotonic() < end, left
        time.sleep(0.2)
    lab("fault", "cable-plug", "n1")
    assert_chosen(n2, place, 1)


@pytest.mark.parametrize(("export", "error"), [("small", errno.ENOSPC), ("quota", errno.EDQUOT)])
def test_no_room(n1: Guest, n2: Guest, export: str, error: int) -> None:
    """The writes succeed, into the client's memory; the server's refusal comes with the fsync."""
    place = str(MOUNTS / export / "checkpoints")
    assert_published(n1.ask("publish", directory=place, step=1, mib=2), 1)
    for _ in range(2):
        answer = n1.ask("publish", directory=place, step=2, mib=10)
        assert answer["error"] == error, answer
        assert on_server(place) == {"step-00000001", "LATEST"}
    assert_chosen(n2, place, 1)
    assert_published(n1.ask("publish", directory=place, step=2, mib=1), 2)
    assert_chosen(n2, place, 2)


@pytest.mark.parametrize(
    ("options", "restart", "errors"),
    [
        ("vers=3,nolock", False, {errno.ESTALE}),
        ("vers=4.2", True, {errno.EIO, errno.ESTALE}),  # which depends on what the client asks for first
        ("vers=4.2", False, {None}),
    ],
    ids=["nfs3", "nfs4-restarted", "nfs4"],
)
def test_a_file_deleted_under_a_reader(
    n1: Guest, n2: Guest, place: str, options: str, restart: bool, errors: set[int | None]
) -> None:
    """NFS 3 has no open files: the handle is stale. NFS 4 keeps the file for its reader, until the server restarts."""
    there = str(mounted("n2", options) / Path(place).name)
    for step in range(1, 5):
        assert_published(n1.ask("publish", directory=place, step=step), step)
    assert_chosen(n2, there, 4)
    path = f"{there}/step-00000001/__0_0.distcp"
    assert n2.ask("read", path=path, size=1 << 19) == {"read": 1 << 19}
    assert n1.ask("retain", directory=place, last=2) == {"removed": [2, 1], "warnings": []}
    if restart:
        lab("fault", "stop-server")
        lab("fault", "start-server")
    answer = n2.ask("read", path=path, size=1 << 19)
    assert answer.get("error") in errors, answer
    assert_chosen(n2, there, 4)


def test_retired_while_another_node_verifies_it(n1: Guest, n2: Guest, place: str) -> None:
    """A zombie of an earlier attempt goes on saving, while the next one is looking for where to resume."""
    for step in (1, 2):
        assert_published(n1.ask("publish", directory=place, step=step), step)
    n2.hold("choose", ("open", "__1_0"), directory=place)
    for step in (3, 4):
        assert_published(n1.ask("publish", directory=place, step=step), step)
    assert n1.ask("retain", directory=place, last=2)["removed"] == [2, 1]
    n2.go_on()
    answer = n2.answer()
    assert answer["step"] is None
    assert all("No such file" in problem or "Stale" in problem for problem in answer["rejected"]), answer
    assert_chosen(n2, place, 4)


def test_soft_gives_up_with_an_error(n1: Guest, n2: Guest, place: str) -> None:
    """Why preflight warns of ``soft``: a pause of the server becomes a failed save. What was there stays whole."""
    there = str(mounted("n1", "vers=3,nolock,soft,timeo=5,retrans=1") / Path(place).name)
    assert_published(n1.ask("publish", directory=there, step=1), 1)
    n1.hold("publish", ("open", "__1_0"), directory=there, step=2)
    lab("fault", "cable-pull", "n1")
    n1.go_on()
    time.sleep(CUT_S)
    lab("fault", "cable-plug", "n1")
    answer = n1.answer()
    assert answer["error"] in (errno.EIO, errno.ETIMEDOUT), answer
    assert_chosen(n2, place, 1)
    assert_published(n1.ask("publish", directory=there, step=2), 2)
    assert_chosen(n2, place, 2)
