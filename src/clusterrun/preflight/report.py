"""What a node reports, and what a check says of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

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

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> NodeReport:
        """Tolerates fields of a newer version."""
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in value.items() if k in names})


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
