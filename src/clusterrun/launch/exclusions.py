"""Nodes that preflight refused, remembered per cluster in the shared directory: later submissions avoid them.

    <shared_dir>/excluded/<cluster>/<node>.json

One file per node, replaced as a whole: conductors of several runs may write at the same time, and the last word counts.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterrun.config.schema import RunConfig
from clusterrun.rundir import make_private, write_durably


@dataclass(frozen=True)
class Exclusion:
    """Why a node is left out, and until when.

    Attributes:
        evidence: every fatal finding on it.
        gpus: uuid and serial of its GPUs, so that a replaced card can be told from the bad one.
        since, until: unix time.
    """

    node: str
    cluster: str
    reason: str
    evidence: tuple[str, ...]
    gpus: tuple[str, ...]
    run_id: str
    since: float
    until: float


@dataclass(frozen=True)
class Exclusions:
    """The list of one cluster."""

    shared_dir: Path
    cluster: str

    @property
    def directory(self) -> Path:
        return self.shared_dir / "excluded" / self.cluster

    def all(self) -> list[Exclusion]:
        """What is listed and has not expired, by node name. Unreadable entries are passed over: they exclude nobody."""
        found = []
        for path in sorted(self.directory.glob("*.json")):
            try:
                value: dict[str, Any] = json.loads(path.read_text())
                entry = Exclusion(**{**value, "evidence": tuple(value["evidence"]), "gpus": tuple(value["gpus"])})
            except (OSError, ValueError, TypeError, KeyError):
                continue
            if entry.until > time.time():
                found.append(entry)
        return found

    def add(self, entry: Exclusion) -> None:
        make_private(self.shared_dir / "excluded")
        make_private(self.directory)
        write_durably(self.directory / f"{entry.node}.json", json.dumps(asdict(entry), indent=1))

    def forgive(self, node: str) -> bool:
        """Take a node off the list. False when it was not on it."""
        path = self.directory / f"{node}.json"
        if "/" in node or not path.exists():
            return False
        path.unlink()
        return True


def of(config: RunConfig) -> Exclusions:
    """The list that belongs to a (validated) configuration."""
    return Exclusions(Path(config.cluster.shared_dir), config.cluster.name)
