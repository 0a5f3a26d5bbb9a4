"""Reading sinfo: the rows of any of its formats, with or without a header, by node, by state or by partition."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clusterrun.launch.gres import Gres, gpus, is_gres, parse_gres
from clusterrun.launch.slurm_steps import expand_host_list

_STATES = frozenset(
    """allocated alloc blocked completing comp down drained drain draining drng fail failing failg future futr idle
    inval maint mixed mix npc perfctrs planned plnd powering_down pow_dn powering_up pow_up powered_down power reboot
    reboot_issued boot reserved resv unknown unk no_respond cloud error""".split()  # noqa: SIM905
)
_MARKS = "*~#!%$@^+-"  # behind a state: not responding, powered down, rebooting, planned by backfill, ...
_HEADERS = {
    "partition": "partition",
    "avail": "avail",
    "timelimit": "time_limit",
    "nodes": "nodes",
    "state": "state",
    "statelong": "state",
    "nodelist": "names",
    "hostnames": "names",
    "node": "names",
    "gres": "gres",
    "gres_used": "used",
    "gresused": "used",
    "cpus": "cpus",
    "cpus(a/i/o/t)": "aiot",
    "memory": "memory",
    "allocmem": "alloc_memory",
    "features": "features",
    "avail_features": "features",
    "reason": "reason",
}
_MOST_STATES = 0.9  # of a column's cells that must be states


@dataclass(frozen=True)
class SinfoRow:
    """One row: a node, or ``nodes`` nodes that are alike. None where the row does not say."""

    nodes: int
    names: tuple[str, ...]
    partition: str | None
    default: bool  # the partition that a job without one goes to
    state: str | None  # without marks, e.g. mixed
    marks: str  # what stood behind the state
    gres: tuple[Gres, ...]
    used: tuple[Gres, ...] | None
    cpus: tuple[int, int, int, int] | None  # allocated, idle, other, total of one node
    memory_mb: int | None

    @property
    def responds(self) -> bool:
        return "*" not in self.marks

    @property
    def gpus(self) -> int:
        """Of all its nodes."""
        return self.nodes * gpus(self.gres)

    @property
    def gpus_used(self) -> int | None:
        """Of all its nodes; None when it does not say, which is not 0."""
        return None if self.used is None else self.nodes * gpus(self.used)


def read_sinfo(text: str, columns: Sequence[str] = ()) -> list[SinfoRow]:
    """The rows. ``columns`` names the cells; else a header does; else each column is known by what it holds.

    Raises:
        ValueError: this is no output of sinfo.
    """
    cells = [_cells(line) for line in text.splitlines() if line.strip()]
    if not cells:
        return []
    names = list(columns)
    if not names:
        heads = [_HEADERS.get(cell.lower()) for cell in cells[0]]
        if all(heads):
            names = [str(head) for head in heads]
            cells = cells[1:]
        else:
            names = _guess(cells)
    return [_row(dict(zip(names, row, strict=False))) for row in cells]


def by_node(rows: Sequence[SinfoRow]) -> list[SinfoRow]:
    """Each node once: a listing by node has a row for every partition that a node is in."""
    found: dict[tuple[str, ...], SinfoRow] = {}
    rest = []
    for row in rows:
        if row.names:
            found.setdefault(row.names, row)
        else:
            rest.append(row)
    return [*found.values(), *rest]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")] if "|" in line else line.split()


def _guess(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names for the columns, from their cells."""
    width = min(len(row) for row in rows)
    names = [""] * width
    for at in range(width):
        column = [row[at] for row in rows]
        known = [cell for cell in column if cell not in ("(null)", "N/A")]
        if all(map(is_gres, column)):
            used = any("IDX:" in cell for cell in column) or "gres" in names
            names[at] = "used" if used and "used" not in names else "gres"
        elif sum(_is_state(cell) for cell in known) >= _MOST_STATES * len(known) and "state" not in names:
            names[at] = "state"
        elif all(re.fullmatch(r"\d+/\d+/\d+/\d+", cell) for cell in known):
            names[at] = "aiot"
        elif all(cell.isdigit() for cell in known):
            names[at] = "nodes" if at == 0 else "number"
        else:
            names[at] = "name"
    _settle(names, rows)
    if not {"gres", "used", "state"} & set(names):
        raise ValueError("not an output of sinfo: no column of states or generic resources")
    return names


def _settle(names: list[str], rows: Sequence[Sequence[str]]) -> None:
    """Which of the plain names are nodes and which partitions, and which number is the memory of a node."""
    plain = [at for at, name in enumerate(names) if name == "name"]
    partitions = [at for at in plain if any(row[at].endswith("*") for row in rows)]
    for at in plain:
        names[at] = "partition" if at in partitions or "names" in names[:at] else "names"
    numbers = [at for at, name in enumerate(names) if name == "number"]
    if numbers:
        names[numbers[-1]] = "memory"


def _is_state(cell: str) -> bool:
    return cell.lower().rstrip(_MARKS) in _STATES or cell.lower() in _STATES


def _row(cell: dict[str, str]) -> SinfoRow:
    names = _hosts(cell.get("names", ""))
    state = cell.get("state", "")
    plain = state.rstrip(_MARKS)
    partition = cell.get("partition", "")
    count = cell.get("nodes", "")
    aiot = cell.get("aiot", "")
    memory = re.match(r"\d+", cell.get("memory", ""))
    return SinfoRow(
        nodes=int(count) if count.isdigit() else max(1, len(names)),
        names=names,
        partition=partition.rstrip("*") or None,
        default=partition.endswith("*"),
        state=plain.lower() or None,
        marks=state[len(plain) :],
        gres=parse_gres(cell.get("gres", "")),
        used=parse_gres(cell["used"]) if "used" in cell else None,
        cpus=_four(aiot),
        memory_mb=int(memory.group()) if memory else None,
    )


def _hosts(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    return tuple(expand_host_list(text)) if "[" in text or "," in text else (text,)


def _four(text: str) -> tuple[int, int, int, int] | None:
    parts = text.split("/")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        return None
    a, i, o, t = map(int, parts)
    return a, i, o, t
