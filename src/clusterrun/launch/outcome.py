"""How a training step ended: what each agent says, and what the conductor makes of all of them together."""

from __future__ import annotations

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


def judge(nodes: Sequence[str], outcomes: Mapping[str, Outcome]) -> StepEnd:
    """One verdict from all agents.

    A failure spreads: when one worker dies, its peers fail too, with errors about closed connections. So what says
    most about the cause wins: a lost node, then a worker killed by a signal, then the earliest exception.
    """
    lost = tuple(node for node in nodes if node not in outcomes)
    for how in (How.port_taken, How.crashed):
        these = [(o.time, node, o) for node, o in outcomes.items() if o.how is how]
        if these:
            _, node, outcome = min(these, key=lambda entry: entry[0])
            return StepEnd(how, node, outcome, lost)
    if lost:
        return StepEnd(How.crashed, None, None, lost)
    failed = [(o.time, node, o) for node, o in outcomes.items() if o.how in (How.failed, How.no_rendezvous)]
    if failed:
        _, node, outcome = min(failed, key=lambda entry: (entry[2].how is not How.failed, entry[0]))
        return StepEnd(outcome.how, node, outcome)
    stopped = [(node, o) for node, o in outcomes.items() if o.how is How.stopped]
    if stopped:
        unsaved = [(node, o) for node, o in stopped if not o.saved]
        node, outcome = (unsaved or stopped)[0]
        return StepEnd(How.stopped, node, outcome)
    node = nodes[0]
    return StepEnd(How.done, node, outcomes[node])
