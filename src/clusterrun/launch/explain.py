"""What an attempt's end is called: from what the agents said, what hung, and what the scheduler says of a stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clusterrun.launch.hang import Blame
from clusterrun.launch.outcome import How, StepEnd, of_the_machinery, signature
from clusterrun.ledger import Ending


@dataclass(frozen=True)
class Result:
    """How one attempt ended. ``requeue``: this allocation has too few nodes left to go on in it."""

    ending: Ending
    message: str = ""
    saved: bool = False  # the workers said that they saved
    error: str | None = None  # for the ledger: what went wrong, and at which step
    step: int | None = None
    requeue: bool = False


def explain(
    end: StepEnd,
    blame: Blame | None,
    signals: set[str],
    *,
    why_stopped: Callable[[set[str]], Ending],
    restart_on_error: bool,
) -> Result:
    """The ledger's word for how a training step ended. ``signals`` are those that the conductor got, ``why_stopped``
    asks the scheduler what a stop was about."""
    outcome = end.outcome
    where = f"{end.node}: " if end.node else ""
    rank = f"rank {outcome.rank}: " if outcome and outcome.rank is not None else ""
    said = outcome.message if outcome else ""
    saved = outcome is not None and outcome.saved
    step = outcome.step if outcome else None
    if end.how is How.done:
        return Result(Ending.done)
    if signals or end.how is How.stopped:
        why = why_stopped(signals)
        message = "state saved" if saved else f"nothing was saved. {where}{rank}{said}".strip()
        return Result(why, message, saved)
    if blame is not None:
        return Result(Ending.hung, blame.message, error="hung", step=blame.step)
    if end.lost and end.how is How.crashed and outcome is None:
        if end.all_lost:
            return Result(Ending.crashed, "the step ended without a word from any of its nodes")
        return Result(Ending.node_lost, f"no word from {', '.join(end.lost)}")
    if end.how is How.failed and outcome is not None:
        message = f"{where}{rank}{said} (exit code {outcome.exit_code})"
        again = restart_on_error or of_the_machinery(said)
        ending = Ending.crashed if again else Ending.user_code_failed
        return Result(ending, message, error=signature(said), step=step)
    return Result(Ending.crashed, f"{where}{rank}{said}", error=signature(said), step=step)
