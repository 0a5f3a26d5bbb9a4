"""Checks of the node itself and of the shared storage. Limits beside each; None in the facts gives UNKNOWN."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from clusterrun.config.schema import InterNode
from clusterrun.nccl.harm import harms, stale_names
from clusterrun.preflight.evidence import Check, Evidence
from clusterrun.preflight.host_facts import UNLIMITED, HostFacts, StorageFacts
from clusterrun.preflight.report import Finding, Verdict

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
GIB = 2**30

# Docker's default is 64 MiB, which DataLoader workers and NCCL's shared memory transport outgrow at once.
SHM_MIN = 1 * GIB
OPEN_FILES_MIN = 4096  # sockets of large jobs, files of DataLoader workers; many systems still default to 1,024
FSYNC_MAX_S = 1.0  # a checkpoint syncs one file per rank; healthy NFS takes milliseconds
LOOKUP_MAX_S = 1.0  # torch's store looks up every client; a dead DNS server costs 5 to 10 s each
SPACE_FAIL, SPACE_WARN = 1 * GIB, 10 * GIB
INODES_MIN = 1000

Judged = tuple[Verdict, str, str]  # verdict, finding, advice
_FABRICS = (InterNode.infiniband, InterNode.roce, InterNode.efa)


def _each_host(name: str, judge: Callable[[HostFacts, Evidence], Judged]) -> Check:
    def check(e: Evidence) -> Iterator[Finding]:
        for node, report in e.reports.items():
            judged = judge(report.host_facts, e) if report.host_facts else (UNKNOWN, "the node did not say", "")
            yield Finding(name, node, *judged)

    return check


def _each_storage(name: str, judge: Callable[[StorageFacts, Evidence], Judged]) -> Check:
    def check(e: Evidence) -> Iterator[Finding]:
        for node, report in e.reports.items():
            facts = report.storage
            judged = judge(facts, e) if facts else (UNKNOWN, "the node did not say", "")
            if facts and judged[0] is UNKNOWN and facts.problem:
                judged = (UNKNOWN, facts.problem, "")
            yield Finding(name, node, *judged)

    return check


def shm_size(f: HostFacts, e: Evidence) -> Judged:
    if f.shm_bytes is None:
        return UNKNOWN, "/dev/shm is no memory file system here", "NCCL and DataLoader workers share memory there"
    if f.shm_bytes < SHM_MIN:
        return FAIL, f"/dev/shm has {f.shm_bytes / 2**20:.0f} MiB", "enlarge it; in a container: --shm-size=8g"
    return PASS, f"/dev/shm has {f.shm_bytes / GIB:.1f} GiB", ""


def memlock(f: HostFacts, e: Evidence) -> Judged:
    if f.memlock_bytes is None:
        return UNKNOWN, "limit not known", ""
    shown = "unlimited" if f.memlock_bytes == UNLIMITED else f"{f.memlock_bytes // 1024} KiB"
    needed = e.cluster.interconnect.inter_node in _FABRICS and e.cluster.nodes > 1
    if f.memlock_bytes != UNLIMITED and needed and not f.may_lock:
        return FAIL, f"locked memory limited to {shown}", "RDMA pins memory: ulimit -l unlimited in slurmd's limits"
    return PASS, shown, ""


def open_files(f: HostFacts, e: Evidence) -> Judged:
    if f.open_files is None:
        return UNKNOWN, "limit not known", ""
    if f.open_files != UNLIMITED and f.open_files < OPEN_FILES_MIN:
        return FAIL, f"at most {f.open_files} open files", f"raise ulimit -n to {OPEN_FILES_MIN} or more"
    return PASS, "unlimited" if f.open_files == UNLIMITED else str(f.open_files), ""


def memory_given(f: HostFacts, e: Evidence) -> Judged:
    if f.memory_bytes is None:
        return UNKNOWN, "not known", ""
    given = f"{f.memory_bytes / GIB:.1f} GiB"
    asked = _bytes(e.cluster.slurm.mem)
    if asked and f.memory_bytes < 0.95 * asked:  # Slurm's own share of the node is a few per cent
        return FAIL, f"{given}, {asked / GIB:.1f} GiB asked for", "see cluster.slurm.mem and the node's RealMemory"
    return PASS, given, ""


def threads(e: Evidence) -> Iterator[Finding]:
    """Threads of all workers within the cores asked for, and within those that the step was really given."""
    workers = e.cluster.nproc_per_node
    for node, report in e.reports.items():
        number = report.host_facts.threads if report.host_facts else None
        if number is None:
            yield Finding("threads", node, UNKNOWN, "OMP_NUM_THREADS is not known, or not a number")
            continue
        asked = workers * e.cluster.cpus_per_proc
        cores = min(asked, report.cpus) if report.cpus else asked
        shown = f"{number} threads x {workers} workers on {cores} cores"
        if number * workers > cores:
            advice = "lower OMP_NUM_THREADS, raise cluster.cpus_per_proc, or see cpu_cores"
            yield Finding("threads", node, FAIL, shown, advice)
        else:
            yield Finding("threads", node, PASS, shown)


def leftovers(f: HostFacts, e: Evidence) -> Judged:
    if f.leftovers is None:
        return UNKNOWN, "processes could not be listed", ""
    if f.leftovers:
        return FAIL, f"an earlier attempt still runs: {f.leftovers[0]}", "end it; it may still write into this run"
    return PASS, "nothing of an earlier attempt", ""


def name_resolution(f: HostFacts, e: Evidence) -> Judged:
    if f.lookup_s is None:
        return UNKNOWN, "not tried", ""
    if f.lookup_s > LOOKUP_MAX_S:
        return FAIL, f"reverse look-up took {f.lookup_s:.1f} s ({f.lookup_problem or 'it worked'})", "check DNS"
    return PASS, f"reverse look-up in {f.lookup_s * 1000:.0f} ms", ""


def interface(e: Evidence) -> Iterator[Finding]:
    """The way to the conductor's host: the same MTU and speed on every node."""
    known = {n: r.host_facts for n, r in e.reports.items() if r.host_facts}
    ways = {n: (f.mtu, f.speed_mbit_s) for n, f in known.items() if f.interface and f.interface != "lo"}
    usual = Counter(ways.values()).most_common(1)[0][0] if ways else None
    for node in e.reports:
        facts = known.get(node)
        if facts is None or facts.interface is None:
            yield Finding("interface", node, UNKNOWN, "interface to the head node not known")
        elif node in ways and ways[node] != usual and usual is not None:
            shown = f"{facts.interface}: MTU {facts.mtu}, {facts.speed_mbit_s} Mbit/s; others {usual[0]}, {usual[1]}"
            yield Finding("interface", node, FAIL, shown, "see cluster.interconnect.interface")
        else:
            yield Finding("interface", node, PASS, facts.interface)


def env_names(e: Evidence) -> Iterator[Finding]:
    """NCCL and Gloo stop at an interface that is not there, and NCCL leaves InfiniBand for sockets without its HCA."""
    for node, report in e.reports.items():
        facts = report.host_facts
        if facts is None or facts.environment is None or facts.interfaces is None:
            yield Finding("env_names", node, UNKNOWN, "the node did not say")
            continue
        wiring = report.gpus.wiring if report.gpus else None
        devices = None if wiring is None else [nic.device or nic.name for nic in wiring.nics]
        wrong = stale_names(facts.environment, facts.interfaces, devices)
        if wrong:
            yield Finding("env_names", node, FAIL, "; ".join(map(str, wrong)), "unset it, or see cluster.env")
        elif devices is None and "NCCL_IB_HCA" in facts.environment:
            yield Finding("env_names", node, UNKNOWN, "RDMA devices not known, NCCL_IB_HCA can't be compared")
        else:
            yield Finding("env_names", node, PASS, "no variable names what is not here")


def env_hurts(f: HostFacts, e: Evidence) -> Judged:
    if f.environment is None:
        return UNKNOWN, "the node did not say", ""
    found = harms(f.environment, e.cluster)
    if found:
        return FAIL, "; ".join(map(str, found)), "unset it, unless it is meant"
    return PASS, "no variable that slows communication", ""


def storage_same(e: Evidence) -> Iterator[Finding]:
    """The run directory lies on the same kind of file system, from the same source, on every node."""
    seen = {n: (r.storage.kind, r.storage.source) for n, r in e.reports.items() if r.storage and r.storage.kind}
    usual = Counter(seen.values()).most_common(1)[0][0] if seen else None
    for node in e.reports:
        if node not in seen:
            yield Finding("storage_same", node, UNKNOWN, "mount of the run directory not known")
        elif seen[node] != usual and usual is not None:
            storage = e.reports[node].storage
            # One server has many addresses: what counts is whether the conductor's file was there.
            there = storage is not None and storage.visible_s is not None
            shown = f"{seen[node][0]} from {seen[node][1]}; others {usual[0]} from {usual[1]}"
            yield Finding("storage_same", node, WARN if there else FAIL, shown, "is shared storage mounted there?")
        else:
            yield Finding("storage_same", node, PASS, f"{seen[node][0]} from {seen[node][1]}")


def storage_visible(f: StorageFacts, e: Evidence) -> Judged:
    if not f.visible_tried:
        return UNKNOWN, "nobody looked", ""
    if f.visible_s is None:
        return FAIL, f"the conductor's file not seen within {e.preflight.visible_within_s:g} s", "not the same storage?"
    return PASS, f"the conductor's file seen after {f.visible_s:.2f} s", ""


def storage_latency(f: StorageFacts, e: Evidence) -> Judged:
    if f.fsync_s is None:
        return UNKNOWN, "not measured", ""
    if f.fsync_s > FSYNC_MAX_S:
        return FAIL, f"write and fsync take {f.fsync_s:.1f} s", "checkpoints will stall training"
    return PASS, f"fsync {f.fsync_s * 1000:.0f} ms", ""


def storage_locks(f: StorageFacts, e: Evidence) -> Judged:
    if f.lock_problem is None:
        return UNKNOWN, "not tried", ""
    own = [o for o in f.options or () if o in ("nolock", "local_lock=all", "local_lock=posix")]
    if own:
        return FAIL, f"mounted {own[0]}: locks don't reach other nodes", "mount with locks"
    return (FAIL, f"no advisory lock: {f.lock_problem}", "mount with locks") if f.lock_problem else (PASS, "locks", "")


def storage_space(f: StorageFacts, e: Evidence) -> Judged:
    if f.free_bytes is None:
        return UNKNOWN, "not known", ""
    shown = f"{f.free_bytes / GIB:.1f} GiB free" + (f", {f.free_inodes} inodes" if f.free_inodes is not None else "")
    if f.free_bytes < SPACE_FAIL or (f.free_inodes is not None and f.free_inodes < INODES_MIN):
        return FAIL, shown, "no room for a checkpoint"
    return (WARN, shown, "little room for checkpoints") if f.free_bytes < SPACE_WARN else (PASS, shown, "")


def storage_options(f: StorageFacts, e: Evidence) -> Judged:
    if f.options is None:
        return UNKNOWN, "not known", ""
    if "ro" in f.options:
        return FAIL, "mounted read-only", ""
    odd = [option for option in ("soft", "softerr", "nocto") if option in f.options]
    if odd:
        return WARN, f"mounted {', '.join(odd)}", "writes may be lost without an error, or seen late on other nodes"
    return PASS, "rw", ""


def _bytes(size: str | None) -> int | None:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", size or "", flags=re.IGNORECASE)
    if not match or match.group(1) == "0":
        return None
    shift = {"K": 10, "": 20, "M": 20, "G": 30, "T": 40}[match.group(2).upper()]
    return int(match.group(1)) << shift


HOST: dict[str, Check] = {
    **{j.__name__: _each_host(j.__name__, j) for j in (shm_size, memlock, open_files, memory_given)},
    **{j.__name__: _each_host(j.__name__, j) for j in (leftovers, name_resolution)},
    "threads": threads,
    "interface": interface,
    "env_names": env_names,
    "env_hurts": _each_host("env_hurts", env_hurts),
    "storage_same": storage_same,
    **{j.__name__: _each_storage(j.__name__, j) for j in (storage_visible, storage_latency, storage_locks)},
    **{j.__name__: _each_storage(j.__name__, j) for j in (storage_space, storage_options)},
}
