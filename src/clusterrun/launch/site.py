"""What a site offers, from sinfo, scontrol and (where there is accounting) sacctmgr."""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from clusterrun import process
from clusterrun.errors import CommandError
from clusterrun.launch.gres import Gres, gpu_types, gpus, parse_gres

_TIMEOUT_S = 20.0
_SINFO = "%R|%P|%a|%l|%D|%c|%m|%G|%f|%T"
_NO_LIMIT = ("UNLIMITED", "infinite", "INFINITE", "NONE", "N/A", "n/a", "(null)", "")


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike. ``cpus`` and ``memory_mb`` are of one node, at least."""

    count: int
    cpus: int
    memory_mb: int
    gres: tuple[Gres, ...]
    features: tuple[str, ...]
    usable: int  # of them neither down nor drained


@dataclass(frozen=True)
class Partition:
    """One partition. Limits are in Slurm's words; None: no limit."""

    name: str
    default: bool
    up: bool
    time_limit: str | None
    kinds: tuple[NodeKind, ...]
    default_time: str | None = None
    max_nodes: int | None = None
    accounts: tuple[str, ...] = ()  # empty: all
    qos: tuple[str, ...] = ()  # empty: all

    @property
    def nodes(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def gpus_per_node(self) -> int:
        """Of the kind with most GPUs over all its nodes."""
        kind = self.gpu_kind
        return gpus(kind.gres) if kind else 0

    @property
    def gpu_kind(self) -> NodeKind | None:
        """The kind of node with most GPUs in all."""
        return max((k for k in self.kinds if gpus(k.gres)), key=lambda k: k.count * gpus(k.gres), default=None)

    @property
    def gres_words(self) -> str:
        """gpu:a100:8 on 20 nodes, gpu:h100:4 on 2 nodes; "no GPUs" """
        found: dict[str, int] = {}
        for kind in self.kinds:
            for kind_of_gpu, count in gpu_types(kind.gres).items():
                word = f"gpu:{kind_of_gpu}:{count}" if kind_of_gpu else f"gpu:{count}"
                found[word] = found.get(word, 0) + kind.count
        return ", ".join(f"{word} on {n} node{'s' if n > 1 else ''}" for word, n in found.items()) or "no GPUs"


@dataclass(frozen=True)
class Association:
    """Under which account, in which partition ("" is any), with which QOS one may submit."""

    account: str
    partition: str
    qos: tuple[str, ...]
    default_qos: str


@dataclass(frozen=True)
class Site:
    """Everything read. ``problems`` says what could not be, so that empty is not taken for none."""

    name: str
    version: str
    partitions: tuple[Partition, ...]
    associations: tuple[Association, ...]
    settings: dict[str, str] = field(default_factory=dict)  # of scontrol show config
    problems: tuple[str, ...] = ()

    @property
    def default(self) -> Partition | None:
        return next((p for p in self.partitions if p.default), None)

    def partition(self, name: str | None) -> Partition | None:
        """By name; without one the default."""
        return next((p for p in self.partitions if p.name == name), None) if name else self.default

    @property
    def accounts(self) -> list[str]:
        return list(dict.fromkeys(a.account for a in self.associations))

    @property
    def qos(self) -> list[str]:
        return list(dict.fromkeys(q for a in self.associations for q in a.qos))


def read_site() -> Site:
    """Ask Slurm. Raises CommandError when not even sinfo answers."""
    problems: list[str] = []

    def ask(*argv: str) -> str:
        try:
            return process.run(argv, timeout_s=_TIMEOUT_S)
        except CommandError as error:
            problems.append(str(error))
            return ""

    shown = process.run(["sinfo", "--noheader", f"--format={_SINFO}"], timeout_s=_TIMEOUT_S)
    partitions = parse_partitions(shown, ask("scontrol", "show", "partition", "--oneliner"))
    settings = parse_settings(ask("scontrol", "show", "config"))
    associations: tuple[Association, ...] = ()
    if settings.get("AccountingStorageType", "").endswith("slurmdbd"):
        user = f"user={getpass.getuser()}"
        argv = ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", user]
        associations = parse_associations(ask(*argv, "format=account,partition,qos,defaultqos"))
    return Site(
        name=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        partitions=partitions,
        associations=associations,
        settings=settings,
        problems=tuple(problems),
    )


def parse_partitions(sinfo: str, scontrol: str = "") -> tuple[Partition, ...]:
    """From ``sinfo --noheader --format=%R|%P|%a|%l|%D|%c|%m|%G|%f|%T`` and ``scontrol show partition --oneliner``."""
    more = {fields.get("PartitionName", ""): fields for fields in map(_fields, scontrol.splitlines())}
    heads: dict[str, tuple[bool, bool, str]] = {}
    kinds: dict[str, list[NodeKind]] = {}
    for line in sinfo.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 10:
            continue
        name, starred, avail, limit, count, cpus, memory, gres, features, state = cells
        heads.setdefault(name, (starred.endswith("*"), avail == "up", limit))
        up = not re.match(r"(down|drain|fail|inval|maint|unk|reboot|power(ed|ing)_down)", state.lower())
        number = int(count)
        kind = NodeKind(
            number,
            _int(cpus),
            _int(memory),
            _gres(gres),
            tuple(f for f in features.split(",") if f and f != "(null)"),
            number if up else 0,
        )
        _add(kinds.setdefault(name, []), kind)
    return tuple(_partition(name, head, kinds[name], more.get(name, {})) for name, head in heads.items())


def _add(kinds: list[NodeKind], new: NodeKind) -> None:
    """sinfo has a row for each state; nodes that differ by nothing else are one kind."""
    for at, old in enumerate(kinds):
        if (old.cpus, old.memory_mb, old.gres, old.features) == (new.cpus, new.memory_mb, new.gres, new.features):
            count, usable = old.count + new.count, old.usable + new.usable
            kinds[at] = NodeKind(count, old.cpus, old.memory_mb, old.gres, old.features, usable)
            return
    kinds.append(new)


def _partition(name: str, head: tuple[bool, bool, str], kinds: list[NodeKind], more: dict[str, str]) -> Partition:
    default, up, limit = head
    return Partition(
        name=name,
        default=default,
        up=up,
        time_limit=_limit(limit),
        kinds=tuple(kinds),
        default_time=_limit(more.get("DefaultTime", "")),
        max_nodes=_int(more["MaxNodes"]) if more.get("MaxNodes", "").isdigit() else None,
        accounts=_names(more.get("AllowAccounts", "ALL")),
        qos=_names(more.get("AllowQos", "ALL")),
    )


def _gres(text: str) -> tuple[Gres, ...]:
    try:
        return tuple(Gres(g.name, g.type, g.count) for g in parse_gres(text) if g.count)
    except ValueError:
        return ()


def _limit(text: str) -> str | None:
    return None if text in _NO_LIMIT else text


def _names(text: str) -> tuple[str, ...]:
    return () if text in ("ALL", *_NO_LIMIT) else tuple(text.split(","))


def _int(text: str) -> int:
    match = re.match(r"\d+", text)  # "64+" when the nodes of a row differ
    return int(match.group()) if match else 0


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", line))


def parse_settings(shown: str) -> dict[str, str]:
    """``scontrol show config``: lines of ``Name = value``."""
    found = {}
    for line in shown.splitlines():
        match = re.match(r"(\w+)\s+=\s(.*)", line)
        if match:
            found[match.group(1)] = match.group(2).strip()
    return found


def parse_associations(shown: str) -> tuple[Association, ...]:
    """``sacctmgr -nP show assoc format=account,partition,qos,defaultqos``."""
    found = []
    for line in shown.splitlines():
        cells = line.split("|")
        if len(cells) == 4:
            qos = tuple(q for q in cells[2].split(",") if q)
            found.append(Association(cells[0], cells[1], qos, cells[3]))
    return tuple(found)


def listed(words: Iterable[str], most: int = 8) -> str:
    """a, b, c and 4 more"""
    every = list(words)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
