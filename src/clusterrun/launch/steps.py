"""A step: one command over chosen nodes, one task per node. Two implementations, one contract (tests/contract)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class StepSpec:
    """What to run: one task on each of ``nodes``, which are in allocation order (Slurm numbers tasks so)."""

    name: str
    nodes: Sequence[str]
    argv: Sequence[str]
    stdout: Path  # output of all tasks, on the conductor's host
    stderr: Path
    env: Mapping[str, str] = field(default_factory=dict)  # added to the conductor's own
    beside: bool = False  # a small helper: takes nothing of the job from other steps, and does not keep them waiting


class Step(Protocol):
    """A started step."""

    def poll(self) -> int | None:
        """None while any task runs, then the largest exit code of the tasks."""
        ...

    def ask_to_stop(self) -> None:
        """Tell all tasks to save and stop (SIGTERM to the agents, which pass it on). Repeating does no harm."""
        ...

    def kill(self) -> None:
        """End every process of the step on every node and wait until they are gone. Harmless when it has ended."""
        ...


class StepRunner(Protocol):
    """Where steps run: a Slurm allocation, or this machine."""

    def nodes(self) -> list[str]:
        """Nodes of the allocation as it is now, in the scheduler's order. A lost node is no longer among them."""
        ...

    def switches(self) -> dict[str, str]:
        """Node -> its leaf switch, as far as the scheduler knows; empty when it does not."""
        ...

    def head_address(self) -> str:
        """An address by which the nodes reach the conductor's host."""
        ...

    def start(self, spec: StepSpec) -> Step:
        """Start a step. Raises CommandError when it can't be started."""
        ...
