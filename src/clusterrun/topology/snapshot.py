"""Recorded snapshots: topologies as JSON, written on a node and read back anywhere.

A file holds ``{"clusterrun_topology": 1, "machines": [...]}``; links are their tokens, unknown is null.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from clusterrun.topology.model import Gpu, Link, Nic, NvLinkPort, Topology, TopologyError

FORMAT = 1
_KEY = "clusterrun_topology"

Rows = tuple[tuple[Link | None, ...], ...]


def dumps(machines: Sequence[Topology]) -> str:
    """The text of a snapshot."""
    return json.dumps({_KEY: FORMAT, "machines": [plain(machine) for machine in machines]}, indent=1) + "\n"


def is_snapshot(text: str) -> bool:
    """True when the text claims to be a snapshot (it may still be a broken one)."""
    return text.lstrip().startswith("{") and f'"{_KEY}"' in text


def loads(text: str) -> list[Topology]:
    """Read a snapshot back.

    Raises:
        TopologyError: not JSON, another format number, or a field that does not fit.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise TopologyError(f"not a readable topology snapshot: {error}") from None
    if not isinstance(document, dict) or document.get(_KEY) != FORMAT:
        found = document.get(_KEY) if isinstance(document, dict) else None
        raise TopologyError(f"topology snapshot of format {found!r}; this version of clusterrun reads {FORMAT}")
    machines = document.get("machines")
    if not isinstance(machines, list) or not machines:
        raise TopologyError("topology snapshot without machines")
    try:
        return [from_plain(machine) for machine in machines]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TopologyError(f"topology snapshot with an unreadable machine: {error!r}") from None


def _token(link: Link | None) -> str | None:
    return None if link is None else str(link)


def plain(machine: Topology) -> dict[str, Any]:
    """One machine as JSON can hold it."""
    entry: dict[str, Any] = {"source": machine.source, "name": machine.name, "driver": machine.driver}
    entry["gpus"] = [_drop_unknown(asdict(gpu)) for gpu in machine.gpus]
    entry["links"] = [[_token(link) for link in row] for row in machine.links]
    entry["nics"] = []
    for nic in machine.nics:
        one = {key: value for key, value in vars(nic).items() if key not in ("links", "nic_links")}
        one["links"] = [_token(link) for link in nic.links]
        one["nic_links"] = [_token(link) for link in nic.nic_links]
        entry["nics"].append(_drop_unknown(one))
    entry["p2p"] = machine.p2p
    entry["host_numa"] = list(machine.host_numa)
    entry["complete"] = machine.complete
    entry["missing"] = list(machine.missing)
    entry["notes"] = list(machine.notes)
    return entry


def _drop_unknown(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value is not None}


def _links(row: Any) -> tuple[Link | None, ...]:
    links: list[Link | None] = []
    for token in row:
        link = None if token is None else Link.parse(token)
        if token is not None and link is None:
            raise ValueError(f"{token!r} is not a link")
        links.append(link)
    return tuple(links)


def _known(kind: type[Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The fields of ``entry`` that this version knows: a newer writer may have added some."""
    names = {item.name for item in fields(kind)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items() if key in names}


def from_plain(entry: dict[str, Any]) -> Topology:
    """The inverse of ``plain``, after JSON or not. Raises what ``loads`` turns into TopologyError."""
    gpus = []
    for item in entry["gpus"]:
        ports = item.get("ports")
        if ports is not None:
            ports = tuple(NvLinkPort(**_known(NvLinkPort, port)) for port in ports)
        gpus.append(Gpu(**{**_known(Gpu, item), "ports": ports}))
    nics = []
    for item in entry.get("nics", ()):
        paths = {"links": _links(item.get("links", ())), "nic_links": _links(item.get("nic_links", ()))}
        nics.append(Nic(**{**_known(Nic, item), **paths}))
    p2p = entry.get("p2p")
    return Topology(
        gpus=tuple(gpus),
        links=tuple(_links(row) for row in entry["links"]),
        nics=tuple(nics),
        source=str(entry.get("source", "snapshot")),
        name=entry.get("name"),
        missing=tuple(entry.get("missing", ())),
        notes=tuple(entry.get("notes", ())),
        host_numa=tuple(entry.get("host_numa", ())),
        p2p=None if p2p is None else tuple(tuple(row) for row in p2p),
        driver=entry.get("driver"),
    )
