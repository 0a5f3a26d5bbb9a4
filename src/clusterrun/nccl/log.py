"""Reader of the lines that NCCL writes with NCCL_DEBUG=INFO: what was really used.

Lines look like ``host:pid:tid [dev] NCCL INFO text`` (2.3 to 2.30), behind what mpirun, srun or a collector put before
them, and several ranks may have written over one another: a line is cut wherever such a head begins.
Formats were read in NCCL's sources (net.cc, p2p.cc, shm.cc, init.cc, enqueue.cc) and in logs that people published; the
tests name them. What is not recognised is passed over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_HEAD = re.compile(r"(?:(?P<host>[\w.-]+):(?P<pid>\d+)(?::\d+)? \[\d+\] )?(?:\S+:\d+ )?NCCL (?P<level>INFO|WARN) ")
# Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/5/GDRDMA; before 2.5 Ring 00 : 15 -> 0 [receive] via NET/Socket/0
_VIA = re.compile(
    r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? : (?P<one>\d+)(?:\[\w+\])? -> (?P<other>\d+)(?:\[\w+\])?"
    r"(?: \[(?P<way>send|receive)\])? via (?P<via>.+)"
)
_NET = re.compile(r"NET/(?P<kind>.+?)/(?P<device>\d+)(?:\(\d+\))?(?P<rest>(?:/\S*)*)(?:\s|$)")
_NICS = re.compile(r"\[\d+\]([\w.-]+):\d+/(?:IB|RoCE)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+[\w.+]*)")
_CHANNELS = re.compile(r"(\d+) coll channels,(?: \d+ collnet channels,)?(?: (\d+) nvls channels,)?")
_ALGO = re.compile(r"(\w+): \d+ Bytes -> Algo (\w+) proto (\w+)")
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")  # enum of 2.18 to 2.30
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_WARNINGS_KEPT = 5


@dataclass
class NcclLog:
    """What the lines say, over all ranks.

    Attributes:
        lines: NCCL's own lines; 0 means that there was nothing to read.
        connected: lines of connections that were set up, by transport: P2P/CUMEM, SHM, NET/IB, NET/Socket, ...
        pairs: (rank, rank) -> transports between them. Communicators number their ranks by themselves.
        gpudirect, staged: connections over a network with and without GPUDirect RDMA.
        devices: network devices used, by NCCL's number; nics: RDMA devices that NCCL found.
        networks: what NCCL chose: IB, Socket, AWS Libfabric, ...
        nvls: whether multicast in NVSwitch is available, by any rank; None when nobody says.
        finished: some rank set up its rings or said "Init COMPLETE". False: the log was cut, or it failed.
        algorithms: (collective, algorithm, protocol) -> times; only with NCCL_DEBUG_SUBSYS=TUNING.
        set_by_user: variables that NCCL says it took from the environment.
    """

    lines: int = 0
    version: str | None = None
    connected: Counter[str] = field(default_factory=Counter)
    pairs: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    hosts: dict[int, set[str]] = field(default_factory=dict)
    channels: int | None = None
    nvls_channels: int | None = None
    nvls: bool | None = None
    gpudirect: int = 0
    staged: int = 0
    devices: set[int] = field(default_factory=set)
    nics: list[str] = field(default_factory=list)
    networks: set[str] = field(default_factory=set)
    no_ib: str = ""
    finished: bool = False
    algorithms: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    set_by_user: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def same_host(self, pair: tuple[int, int]) -> bool | None:
        """Whether both ranks are known to be on one host; None when that is not clear."""
        one, other = (self.hosts.get(rank, set()) for rank in pair)
        return one == other if len(one) == len(other) == 1 else None


def read(lines: Iterable[str]) -> NcclLog:
    """All that the lines say. Never raises: a line that is cut or unknown says nothing."""
    log = NcclLog()
    for line in lines:
        if "NCCL" not in line:
            continue
        if match := _VERSION.search(line):
            log.version = match[1]
        heads = list(_HEAD.finditer(line))
        for at, head in enumerate(heads):
            end = heads[at + 1].start() if at + 1 < len(heads) else len(line)
            _take(log, head["host"], head["level"], line[head.end() : end].strip())
    return log


def _take(log: NcclLog, host: str | None, level: str, text: str) -> None:
    log.lines += 1
    if level == "WARN":
        if text not in log.warnings and len(log.warnings) < _WARNINGS_KEPT:
            log.warnings.append(text)
    elif match := _VIA.match(text):
        _connection(log, host, match)
    elif text.startswith(("Connected all", "Connected NVLS")) or text.endswith("Init COMPLETE"):
        log.finished = True
    elif match := _CHANNELS.match(text):
        log.channels = int(match[1])
        log.nvls_channels = None if match[2] is None else int(match[2])
    elif match := _ALGO.match(text):
        log.algorithms[match[1], _named(match[2], _ALGORITHMS), _named(match[3], _PROTOCOLS)] += 1
    elif text.startswith("Using network "):
        log.networks.add(text.removeprefix("Using network ").strip())
    elif text.startswith("NET/IB : Using"):
        log.nics = list(dict.fromkeys([*log.nics, *_NICS.findall(text)]))
    elif text.startswith(
        ("NET/IB : No device found", "Failed to open libibverbs", "Net/IB: call to devices() returned 0")
    ):
        log.no_ib = text
    elif match := re.match(r"NVLS multicast support is (not )?available", text, re.IGNORECASE):
        log.nvls = bool(log.nvls) or match[1] is None
    elif match := re.match(r"(NCCL_\w+) set by environment to (.+?)\.?$", text):
        log.set_by_user[match[1]] = match[2]


def _connection(log: NcclLog, host: str | None, match: re.Match[str]) -> None:
    one, other, via = int(match["one"]), int(match["other"]), match["via"]
    kind = transport(via)
    if kind is None:
        return
    log.connected[kind] += 1
    log.pairs.setdefault((min(one, other), max(one, other)), set()).add(kind)
    if host:
        log.hosts.setdefault(other if match["way"] == "receive" else one, set()).add(host)
    if kind.startswith("NET/") and (net := _NET.match(via)):
        log.devices.add(int(net["device"]))
        if "GDRDMA" in net["rest"]:
            log.gpudirect += 1
        else:
            log.staged += 1


def transport(via: str) -> str | None:
    """P2P/CUMEM, SHM, NET/IB, ...: without device numbers and what else follows. None: not known, or cut short."""
    if match := _NET.match(via):
        kind = match["kind"]
        return f"NET/{'IB' if kind.startswith('IB') else kind}"  # IBext_v8 is NVIDIA's plugin of the same kind
    if via.startswith(("SHM", "direct shared memory")):
        return "SHM"
    if match := re.match(r"P2P/(CUMEM|IPC|direct pointer|indirect|MNNVL|CE)", via):
        return f"P2P/{match[1]}"
    return None


def _named(word: str, names: tuple[str, ...]) -> str:
    """Before 2.24 NCCL printed the number of an algorithm."""
    if word.isdigit():
        return names[int(word)] if int(word) < len(names) else word
    return word.upper()
