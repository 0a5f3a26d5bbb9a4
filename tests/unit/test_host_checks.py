"""Checks of host and storage: each fails, passes and says UNKNOWN; the readers on real files, mounts and processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.schema import ClusterConfig, InterconnectConfig, InterNode, PreflightConfig, SlurmConfig
from clusterrun.preflight import host_facts
from clusterrun.preflight.checks.host import HOST
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.host_facts import HostFacts, StorageFacts
from clusterrun.preflight.report import Finding, NodeReport, Verdict

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
GIB = 2**30
GOOD_HOST = HostFacts(
    shm_bytes=8 * GIB,
    memlock_bytes=-1,
    open_files=65_536,
    memory_bytes=64 * GIB,
    threads=1,
    leftovers=(),
    lookup_s=0.01,
    interface="ib0",
    mtu=4092,
    speed_mbit_s=200_000,
    environment={},
    interfaces=("lo", "ib0"),
)
GOOD_STORAGE = StorageFacts("nfs4", "nas:/x", ("rw", "hard"), 500 * GIB, 10**6, 0.004, 0.001, "", 0.01, True)
RDMA = ClusterConfig(
    nodes=3,
    nproc_per_node=2,
    interconnect=InterconnectConfig(inter_node=InterNode.infiniband),
    slurm=SlurmConfig(mem="60G"),
)


def judge(check: str, host: HostFacts | None = GOOD_HOST, storage: StorageFacts | None = GOOD_STORAGE) -> Finding:
    """The finding on c2, with two good nodes beside it."""
    reports = {}
    for node, own_host, own_storage in (
        ("c1", GOOD_HOST, GOOD_STORAGE),
        ("c2", host, storage),
        ("c3", GOOD_HOST, GOOD_STORAGE),
    ):
        plain: dict[str, Any] = {f.name: None for f in dataclasses.fields(NodeReport)}
        reports[node] = NodeReport(**{**plain, "node": node, "host_facts": own_host, "storage": own_storage})
    evidence = Evidence(("c1", "c2", "c3"), reports, RDMA, PreflightConfig(), (0.0, 1.0))
    findings = {f.node: f for f in HOST[check](evidence)}
    assert findings["c1"].verdict is PASS, "a good node passes beside a bad one"
    return findings["c2"]


def host(**change: Any) -> HostFacts:
    return dataclasses.replace(GOOD_HOST, **change)


def storage(**change: Any) -> StorageFacts:
    return dataclasses.replace(GOOD_STORAGE, **change)


BAD: list[tuple[str, dict[str, Any], Verdict, str]] = [
    ("shm_size", {"host": host(shm_bytes=64 * 2**20)}, FAIL, "64 MiB"),
    ("memlock", {"host": host(memlock_bytes=65_536)}, FAIL, "64 KiB"),
    ("open_files", {"host": host(open_files=1024)}, FAIL, "1024"),
    ("memory_given", {"host": host(memory_bytes=8 * GIB)}, FAIL, "8.0 GiB, 60.0 GiB asked for"),
    ("threads", {"host": host(threads=16)}, FAIL, "16 threads x 2 workers on 2 cores"),
    ("leftovers", {"host": host(leftovers=("77: python",))}, FAIL, "77: python"),
    ("name_resolution", {"host": host(lookup_s=2.0, lookup_problem="no answer")}, FAIL, "2.0 s"),
    ("interface", {"host": host(mtu=1500)}, FAIL, "MTU 1500"),
    ("env_names", {"host": host(environment={"NCCL_SOCKET_IFNAME": "eth"})}, FAIL, "selects no network interface"),
    ("env_hurts", {"host": host(environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})}, FAIL, "every collective"),
    (
        "storage_same",
        {"storage": storage(kind="ext4", source="/dev/sda1", visible_s=None)},
        FAIL,
        "ext4 from /dev/sda1",
    ),
    ("storage_same", {"storage": storage(source="nas2:/x")}, WARN, "nfs4 from nas2:/x"),
    ("storage_visible", {"storage": storage(visible_s=None)}, FAIL, "not seen within 5 s"),
    ("storage_latency", {"storage": storage(fsync_s=3.0)}, FAIL, "3.0 s"),
    ("storage_locks", {"storage": storage(lock_problem="No locks available")}, FAIL, "No locks available"),
    ("storage_locks", {"storage": storage(options=("rw", "nolock"))}, FAIL, "nolock"),
    ("storage_space", {"storage": storage(free_bytes=2**20)}, FAIL, "0.0 GiB free"),
    ("storage_space", {"storage": storage(free_inodes=3)}, FAIL, "3 inodes"),
    ("storage_space", {"storage": storage(free_bytes=5 * GIB)}, WARN, "5.0 GiB"),
    ("storage_options", {"storage": storage(options=("ro", "hard"))}, FAIL, "read-only"),
    ("storage_options", {"storage": storage(options=("rw", "soft", "nocto"))}, WARN, "soft, nocto"),
]

UNSAID: list[tuple[str, dict[str, Any]]] = [
    *((check, {"host": None, "storage": None}) for check in HOST),
    ("shm_size", {"host": host(shm_bytes=None)}),
    ("memlock", {"host": host(memlock_bytes=None)}),
    ("open_files", {"host": host(open_files=None)}),
    ("memory_given", {"host": host(memory_bytes=None)}),
    ("threads", {"host": host(threads=None)}),
    ("leftovers", {"host": host(leftovers=None)}),
    ("name_resolution", {"host": host(lookup_s=None)}),
    ("interface", {"host": host(interface=None)}),
    ("env_names", {"host": host(environment=None)}),
    ("env_names", {"host": host(interfaces=None)}),
    ("env_names", {"host": host(environment={"NCCL_IB_HCA": "mlx5_0"})}),
    ("env_hurts", {"host": host(environment=None)}),
    ("storage_same", {"storage": storage(kind=None)}),
    ("storage_visible", {"storage": storage(visible_s=None, visible_tried=False, problem="Stale file handle")}),
    ("storage_latency", {"storage": storage(fsync_s=None)}),
    ("storage_locks", {"storage": storage(lock_problem=None)}),
    ("storage_space", {"storage": storage(free_bytes=None)}),
    ("storage_options", {"storage": storage(options=None)}),
]


@pytest.mark.parametrize("check", HOST)
def test_a_good_node_passes(check: str) -> None:
    assert judge(check).verdict is PASS


@pytest.mark.parametrize(("check", "facts", "verdict", "words"), BAD)
def test_a_bad_node_is_named(check: str, facts: dict[str, Any], verdict: Verdict, words: str) -> None:
    finding = judge(check, **facts)
    assert finding.verdict is verdict
    assert words in finding.finding


def test_every_check_has_a_bad_case() -> None:
    assert {case[0] for case in BAD} == set(HOST)


@pytest.mark.parametrize(("check", "facts"), UNSAID)
def test_what_is_not_known_is_no_pass(check: str, facts: dict[str, Any]) -> None:
    assert judge(check, **facts).verdict is UNKNOWN


def shown(process: subprocess.Popen[bytes]) -> None:
    """Wait until the kernel shows the new command line: right after the start it may be empty."""
    for part in ("cmdline", "environ"):
        while not Path(f"/proc/{process.pid}/{part}").read_bytes():
            time.sleep(0.01)


def test_who_may_lock_memory_or_needs_not_to() -> None:
    assert judge("memlock", host=host(memlock_bytes=65_536, may_lock=True)).verdict is PASS
    assert judge("memlock", host=host(memlock_bytes=65_536, may_lock=None)).verdict is FAIL


class TestReaders:
    def test_this_host(self, tmp_path: Path) -> None:
        facts = host_facts.read_host("127.0.0.1", "127.0.0.1", tmp_path, 1)
        assert facts.interface == "lo"
        assert facts.memory_bytes
        assert facts.leftovers == ()
        assert facts.lookup_s is not None
        assert facts.lookup_s < 5

    def test_a_hanging_name_server_is_given_up(self) -> None:
        released = threading.Event()
        begin = time.monotonic()
        seconds, problem = host_facts.reverse_lookup("10.0.0.1", lambda address: released.wait(30), patience_s=0.2)
        released.set()
        assert time.monotonic() - begin < 2
        assert seconds is not None
        assert seconds >= 0.2
        assert "no answer within 0.2 s" in problem

    def test_a_worker_of_an_earlier_attempt_is_found(self, tmp_path: Path) -> None:
        argv = [sys.executable, "-c", "import time; time.sleep(60)", f"--run-dir={tmp_path}", "--attempt=1"]
        with subprocess.Popen(argv) as old:
            try:
                shown(old)
                assert host_facts.leftovers(tmp_path, attempt=1) == ()
                assert host_facts.leftovers(tmp_path / "other", attempt=2) == ()
                (found,) = host_facts.leftovers(tmp_path, attempt=2) or ()
            finally:
                old.kill()
        assert found.startswith(f"{old.pid}: ")

    def test_a_worker_of_a_script_is_found_by_what_it_inherited(self, tmp_path: Path) -> None:
        env = {**os.environ, "CLUSTERRUN_RUN_DIR": str(tmp_path), "CLUSTERRUN_ATTEMPT": "1"}
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env) as old:
            try:
                shown(old)
                assert host_facts.leftovers(tmp_path, attempt=1) == ()
                assert len(host_facts.leftovers(tmp_path, attempt=2) or ()) == 1
            finally:
                old.kill()

    def test_a_process_of_another_node_is_not_blamed_on_this_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        argv = [sys.executable, "-c", "import time; time.sleep(60)", f"--run-dir={tmp_path}", "--attempt=1"]
        with subprocess.Popen(argv, env={**os.environ, "CLUSTERRUN_NODE": "node1"}) as old:
            try:
                shown(old)
                monkeypatch.setenv("CLUSTERRUN_NODE", "node0")
                elsewhere = host_facts.leftovers(tmp_path, attempt=2)
                monkeypatch.setenv("CLUSTERRUN_NODE", "node1")
                here = host_facts.leftovers(tmp_path, attempt=2)
            finally:
                old.kill()
        assert elsewhere == ()
        assert here is not None
        assert len(here) == 1

    def test_one_that_is_just_ending_is_waited_for(self, tmp_path: Path) -> None:
        argv = [sys.executable, "-c", "import time; time.sleep(0.5)", f"--run-dir={tmp_path}", "--attempt=1"]
        with subprocess.Popen(argv) as old:
            shown(old)
            waiter = threading.Thread(target=old.wait)
            waiter.start()
            assert host_facts.settled_leftovers(tmp_path, attempt=2) == ()
            waiter.join()

    def test_a_hanging_file_system_is_given_up(self, tmp_path: Path) -> None:
        pipe = tmp_path / ".token"
        os.mkfifo(pipe)  # opening it waits for a writer that never comes, as a read from a dead server does
        begin = time.monotonic()
        assert host_facts.within(0.3, lambda: host_facts.read_storage(tmp_path, pipe, "abc", within_s=1)) is None
        assert time.monotonic() - begin < 2
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # lets the thread go on

    def test_memory_is_the_tightest_limit_above(self, tmp_path: Path) -> None:
        job = tmp_path / "sys/fs/cgroup/slurm/job_7/step_0"
        job.mkdir(parents=True)
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text("MemTotal:       1000000 kB\n")
        (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
        assert host_facts.memory_given(tmp_path) == 1_000_000 * 1024
        (job / "memory.max").write_text("max\n")
        (job.parent / "memory.max").write_text("4096000\n")
        assert host_facts.memory_given(tmp_path) == 4_096_000

    def test_storage_of_a_real_directory(self, tmp_path: Path) -> None:
        token = tmp_path / ".token"
        token.write_text("abc")
        facts = host_facts.read_storage(tmp_path, token, "abc", within_s=1)
        assert facts.problem == ""
        assert facts.kind
        assert facts.options is not None
        assert "rw" in facts.options
        assert facts.lock_problem == ""
        assert facts.fsync_s is not None
        assert facts.visible_s is not None
        assert os.listdir(tmp_path) == [".token"], "nothing is left behind"

    def test_a_file_that_comes_late_is_waited_for(self, tmp_path: Path) -> None:
        token = tmp_path / ".token"
        timer = threading.Timer(0.3, lambda: token.write_text("abc"))
        timer.start()
        seconds = host_facts.wait_for_token(token, "abc", within_s=5)
        timer.join()
        assert seconds is not None
        assert 0.2 < seconds < 4

    def test_another_runs_token_does_not_count(self, tmp_path: Path) -> None:
        (tmp_path / ".token").write_text("old")
        assert host_facts.wait_for_token(tmp_path / ".token", "abc", within_s=0.1) is None

    def test_a_full_file_system_says_so(self, tmp_path: Path) -> None:
        small = tmp_path / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
        if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("mounting a small file system needs root")
        try:
            with pytest.raises(OSError, match="No space left"):
                (small / "filler").write_bytes(b"x" * 2**20)
            facts = host_facts.read_storage(small, small / ".token", "", within_s=0)
        finally:
            subprocess.run(["umount", str(small)], check=True)
        assert "No space left" in facts.problem
        assert facts.free_bytes == 0
        assert judge("storage_space", storage=facts).verdict is FAIL

    def test_a_read_only_mount_says_so(self, tmp_path: Path) -> None:
        small = tmp_path / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k,ro", "tmpfs", str(small)]
        if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("mounting a file system needs root")
        try:
            facts = host_facts.read_storage(small, small / ".token", "", within_s=0)
        finally:
            subprocess.run(["umount", str(small)], check=True)
        assert "Read-only file system" in facts.problem
        assert facts.options is not None
        assert "ro" in facts.options
