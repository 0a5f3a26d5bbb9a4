"""What was measured, as values that travel as JSON. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from clusterrun.measure import collectives

MEASURED = "measured"  # the kind of event, and of message, that carries a Row


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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Row:
        names = cls.__dataclass_fields__
        return cls(**{**{k: v for k, v in value.items() if k in names}, "ranks": tuple(value["ranks"])})
