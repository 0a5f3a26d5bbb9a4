"""How a training step ended: what each agent says, and what the conductor makes of all of them together."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

FRAME = "outcome"


class How(Enum):
    done = "done"
    stopped = "stopped"  # asked to stop, and did
    failed = "failed"  # a worker ended with an exit code
    crashed = "crashed"  # a worker died of a signal
    port_taken = "port_taken"  # the rendezvous port was seen free by preflight and is no longer
    no_rendezvous = "no_rendezvous"  # not all agents came together in time


@dataclass(frozen=True)
class Outcome:
    """What one agent reports at its end."""

    how: How
    saved: bool = False  # stopped workers said that they saved their state
    rank: int | None = None  # the first that failed on this node
    exit_code: int | None = None
    message: str = ""
    time: float = 0.0  # unix time of the first failure
    step: int | None = None  # the last step begun on this node

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "how": self.how.value}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Outcome:
        return cls(**{**value, "how": How(value["how"])})


@dataclass(frozen=True)
class StepEnd:
    """The step as a whole. ``lost`` are nodes whose agent said nothing: dead, cut off, or killed."""

    how: How
    node: str | None
    outcome: Outcome | None
    lost: tuple[str, ...] = ()
    all_lost: bool = False  # not one agent said how it ended: whoever started them is gone


# Words of errors that come from the network, the GPU or the storage, not from the task: torch raises them as ordinary
# exceptions. Gloo names its source files, NCCL and CUDA themselves.
_MACHINERY = re.compile(
    r"gloo/|\bNCCL\b|nccl[A-Z]|Dist(Backend|Network|Store)Error|CUDA error|CUDA driver error|AcceleratorError|\bECC\b"
    r"|Connection (reset|refused|closed|timed out)|Broken pipe|Stale file handle|Input/output error"
    r"|Transport endpoint|No route to host|Network is unreachable|Socket Timeout|RendezvousConnectionError"
)


def of_the_machinery(message: str) -> bool:
    """Whether an exception's text is about what the task runs on. Starting again may help then."""
    return _MACHINERY.search(message) is not None


def signature(message: str) -> str:
    """An error without what differs from one time to the next: numbers, addresses."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", message)


def judge(nodes: Sequence[str], outcomes: Mapping[str, Outcome]) -> StepEnd:
    """One verdict from all agents.

    A failure spreads: when one worker dies, its peers fail too, with errors about closed connections, or abort. So what
    says most about the cause wins: a worker killed by a signal (but SIGABRT, which is how peers often go), a lost node,
    then the earliest failure.
    """
    lost = tuple(node for node in nodes if node not in outcomes)
    for first in (How.port_taken, How.crashed):
        these = {n: o for n, o in outcomes.items() if o.how is first and o.exit_code != -signal.SIGABRT}
        if these:
            return StepEnd(first, *_earliest(these), lost)
    if lost:
        return StepEnd(How.crashed, None, None, lost, all_lost=len(lost) == len(nodes))
    for hows in ((How.failed, How.crashed), (How.no_rendezvous,)):
        these = {n: o for n, o in outcomes.items() if o.how in hows}
        if these:
            node, outcome = _earliest(these)
            return StepEnd(outcome.how, node, outcome)
    stopped = [(node, o) for node, o in outcomes.items() if o.how is How.stopped]
    if stopped:
        unsaved = [(node, o) for node, o in stopped if not o.saved]
        return StepEnd(How.stopped, *(unsaved or stopped)[0])
    return StepEnd(How.done, nodes[0], outcomes[nodes[0]])


def _earliest(outcomes: Mapping[str, Outcome]) -> tuple[str, Outcome]:
    return min(outcomes.items(), key=lambda entry: entry[1].time)
