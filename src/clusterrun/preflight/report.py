"""What a node reports, and what a check says of it."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from clusterrun.preflight.gpu_facts import GpuFacts
from clusterrun.preflight.host_facts import HostFacts, StorageFacts

FRAME = "preflight"


class Verdict(Enum):
    """UNKNOWN means that the check could not be made. It is not PASS."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class NodeReport:
    """What one node saw. Problems are texts; an empty text means that there was none."""

    node: str
    host: str
    time: float  # unix time on that node when it wrote this
    python: str
    executable: str
    packages: dict[str, str]
    visible_gpus: int | None  # of CUDA_VISIBLE_DEVICES; None when it is not set
    nvml_gpus: int | None  # of the driver; None when it could not be asked
    nvml_problem: str
    cpus: int  # cores this process may use
    address: str | None
    address_problem: str
    port: int | None  # seen free on that node
    run_dir_problem: str
    gpus: GpuFacts | None = None  # None when they were not asked for
    host_facts: HostFacts | None = None
    storage: StorageFacts | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> NodeReport:
        """Tolerates fields of a newer version."""
        report = from_plain(cls, value)
        assert isinstance(report, NodeReport)
        return report


# Reading hints takes longer than reading the values: cached.
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def from_plain(kind: Any, value: Any) -> Any:
    """The inverse of ``dataclasses.asdict`` after JSON. Fields that this version does not know are left out."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if value is None or kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return from_plain(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        return tuple(from_plain(args[0], item) for item in value)
    if origin is dict:
        return {key: from_plain(args[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        names = [f.name for f in dataclasses.fields(kind) if f.name in value]
        return kind(**{name: from_plain(hints[name], value[name]) for name in names})  # type: ignore[operator]
    return value


@dataclass(frozen=True)
class Finding:
    """One check on one node."""

    check: str
    node: str
    verdict: Verdict
    finding: str
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        return {**dataclasses.asdict(self), "verdict": self.verdict.value}

    def __str__(self) -> str:
        return f"{self.verdict.value} {self.node} {self.check}: {self.finding}" + (
            f" ({self.advice})" if self.advice else ""
        )


@dataclass(frozen=True)
class Decision:
    """Which nodes train, and why the others don't."""

    chosen: tuple[str, ...]
    bad: dict[str, str]  # node -> the first reason
    findings: tuple[Finding, ...] = field(repr=False, default=())
