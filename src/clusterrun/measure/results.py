"""What was measured, as values that travel as JSON. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from clusterrun.measure import collectives

MEASURED = "measured"  # the kind of event that carries a Row, and of message that carries a NodeMeasured
# What a rank may be at besides a phase; the last is for the other ranks.
IMPORT, PRODUCT, COPIES, WAIT = "import", "matrix product", "copies", "wait"


@dataclass(frozen=True)
class Row:
    """One collective in one group at one size.

    Attributes:
        phase: why this group (``groups.Phase.name``).
        bytes: as nccl-tests counts them (``collectives``).
        seconds: the slowest rank's median over ``iterations``.
        best_s: the slowest rank's fastest iteration.
        wrong: elements of the result that were not as they should be; None when that was not looked at.
    """

    phase: str
    ranks: tuple[int, ...]
    collective: str
    bytes: int
    seconds: float
    best_s: float
    iterations: int
    wrong: int | None

    @property
    def algbw(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bytes per second."""
        return collectives.busbw(self.collective, len(self.ranks), self.bytes, self.seconds)

    @property
    def best_busbw(self) -> float:
        """Bytes per second, of the fastest iteration: what the wire can do when nothing else disturbs."""
        return collectives.busbw(self.collective, len(self.ranks), self.bytes, self.best_s)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Row:
        names = cls.__dataclass_fields__
        return cls(**{**{k: v for k, v in value.items() if k in names}, "ranks": tuple(value["ranks"])})


@dataclass(frozen=True)
class DeviceResult:
    """What one rank's device did by itself. None: not measured.

    Attributes:
        local: the rank within its node.
        uuid: of the GPU; "" for a CPU.
        flops: of a matrix product, per second.
        repeatable: whether the same product came out with the same bits.
        to_device, from_device: bytes per second. On a CPU both are a copy within memory.
        pcie_gen, pcie_width: read while copying. pcie_problem: why they could not be.
    """

    local: int
    uuid: str = ""
    flops: float | None = None
    repeatable: bool | None = None
    to_device: float | None = None
    from_device: float | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    pcie_problem: str = ""


@dataclass(frozen=True)
class Stuck:
    """Something that did not come to its end.

    Attributes:
        what: IMPORT, PRODUCT, COPIES, WAIT, or the name of a phase.
        local: the rank of this node that was at it, the first where several were.
        ranks: the members of the group, for a phase.
        why: "no answer in 60 s", "killed by SIGSEGV", or an error's own words.
    """

    what: str
    local: int
    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class NodeMeasured:
    """What one node measured in one step. ``ports``: seen free on it at the end."""

    node: str
    devices: tuple[DeviceResult, ...] = ()
    rows: tuple[Row, ...] = ()
    stuck: tuple[Stuck, ...] = ()
    ports: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> NodeMeasured:
        return cls(
            node=value["node"],
            devices=tuple(DeviceResult(**one) for one in value["devices"]),
            rows=tuple(Row.from_json(one) for one in value["rows"]),
            stuck=tuple(Stuck(**{**one, "ranks": tuple(one["ranks"])}) for one in value["stuck"]),
            ports=tuple(value["ports"]),
        )


def better_of(one: NodeMeasured, other: NodeMeasured) -> NodeMeasured:
    """Two measurements of a node as one: the higher rate of each thing, since a disturbance only slows; whatever was
    wrong or stuck in either."""
    rows: dict[tuple[str, tuple[int, ...]], Row] = {}
    for row in (*one.rows, *other.rows):
        before = rows.get((row.phase, row.ranks))
        if before is not None:
            better = min(before, row, key=lambda r: r.best_s)
            row = replace(better, wrong=max(before.wrong or 0, row.wrong or 0))
        rows[row.phase, row.ranks] = row
    devices: dict[int, DeviceResult] = {device.local: device for device in one.devices}
    for device in other.devices:
        first = devices.get(device.local, device)
        highest: dict[str, Any] = {
            name: max((v for v in (getattr(first, name), getattr(device, name)) if v is not None), default=None)
            for name in ("flops", "to_device", "from_device", "pcie_gen", "pcie_width")
        }
        differs = False in (first.repeatable, device.repeatable)
        devices[device.local] = replace(device, **highest, repeatable=False if differs else device.repeatable)
    in_order = tuple(device for _, device in sorted(devices.items()))
    ports = other.ports or one.ports
    return NodeMeasured(one.node, in_order, tuple(rows.values()), (*one.stuck, *other.stuck), ports)


@dataclass(frozen=True)
class Work:
    """What the nodes are asked to measure in one step. Travels as one argument.

    Attributes:
        kind: what every job goes through (``groups.work_phases``).
        devices: matrix products and copies first.
        size: bytes of each collective.
        timeout_s: for each part; then the process is killed.
    """

    accelerator: str
    per_node: int
    kind: str
    size: int
    timeout_s: float
    devices: bool = False
    jobs: tuple[Job, ...] = ()  # none: every node is a job of its own

    def to_argument(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_argument(cls, text: str) -> Work:
        value = json.loads(text)
        jobs = tuple(Job(**{**one, "nodes": tuple(one["nodes"])}) for one in value["jobs"])
        return cls(**{**value, "jobs": jobs})


@dataclass(frozen=True)
class Job:
    """Nodes that measure together. Rank = place of the node among them x ranks per node + local rank.

    ``endpoint`` (address:port on the first of them) is where they meet; ``token`` keeps strangers out.
    """

    nodes: tuple[str, ...]
    endpoint: str
    token: str
