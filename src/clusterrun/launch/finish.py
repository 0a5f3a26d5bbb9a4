"""What follows from the end of an attempt: another one right here, a requeue, or the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clusterrun.checkpoint.store import Store
from clusterrun.config.schema import OnShortage, RunConfig
from clusterrun.errors import CommandError, ExitCode
from clusterrun.launch import exclusions, notify
from clusterrun.launch.allocation import Allocation
from clusterrun.launch.explain import Result
from clusterrun.ledger import Ending, Ledger
from clusterrun.rundir import RunDir

_REQUEUED = (Ending.preempted, Ending.time_limit, Ending.requeued, Ending.stopped)
_EXIT_CODES = {
    Ending.done: ExitCode.DONE,
    Ending.user_code_failed: ExitCode.USER_CODE_FAILED,
    Ending.internal_error: ExitCode.USER_CODE_FAILED,
    Ending.preflight_refused: ExitCode.PREFLIGHT_REFUSED,
    Ending.not_enough_nodes: ExitCode.NOT_ENOUGH_NODES,
    Ending.cancelled: ExitCode.CANCELLED,
}
_EVENTS = {
    int(ExitCode.DONE): "done",
    int(ExitCode.REQUEUE): "stopped",
    int(ExitCode.CANCELLED): "cancelled",
}


class Finish:
    """Writes the ends of a run's attempts, and acts on them."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        allocation: Allocation,
        ledger: Ledger,
        store: Store,
        say: Callable[[str], None],
    ) -> None:
        self._run = run
        self._config = config
        self._allocation = allocation
        self._ledger = ledger
        self._store = store
        self._say = say

    def finish(self, number: int, result: Result) -> int | None:
        """Write the end of an attempt. Returns the job's exit code, or None to start the next attempt right here."""
        ending, message = result.ending, result.message
        saved = self._store.latest_step()
        code = _EXIT_CODES.get(ending)
        if ending is Ending.not_enough_nodes and self._may_try_other_nodes(result):
            self._ledger.end(number, ending, saved_after=saved, message=message)
            without = [entry.node for entry in exclusions.of(self._config).all()] if self._by_policy() else []
            self._say(
                f"attempt {number}: {ending.value}, queued again{' without the refused' * bool(without)}. {message}"
            )
            return self._requeue(number, ending, saved, without)
        if ending in _REQUEUED and not self._config.recovery.requeue:
            code = ExitCode.REQUEUE
        if code is not None:
            self._ledger.end(number, ending, saved_after=saved, exit_code=int(code), message=message)
            self._say(f"attempt {number}: {ending.value}. {message}")
            return int(code)
        self._ledger.end(
            number,
            ending,
            saved_after=saved,
            progressed=result.saved and self._config.train.script is not None,
            message=message,
            error=result.error,
            step=result.step,
        )
        self._say(f"attempt {number}: {ending.value}, newest checkpoint: step {saved}. {message}")
        if self._ledger.same_error_again():
            return self.give_up(f"the same error twice at step {result.step}")
        if ending not in _REQUEUED:
            return None
        stalled = self._ledger.stalled(saved)
        if stalled >= self._config.recovery.max_stalled_attempts:
            return self.give_up(f"{stalled} attempts in a row without a newer checkpoint")
        return self._requeue(number, ending, saved, [])

    def tell_end(self, code: int) -> None:
        """Tell of the run's end, when it has ended and not only this job."""
        if self._ledger.attempts()[-1].exit_code is not None:
            self._tell(_EVENTS.get(code, "failed"))

    def _tell(self, event: str) -> None:
        """A web hook, when one is set; from the last attempt as the ledger has it."""
        if self._config.notify.webhook_env is None:
            return
        try:
            last = self._ledger.attempts()[-1]
        except OSError as error:
            self._say(f"notify: the ledger can't be read ({error.strerror}), so nobody was told")
            return
        text = f"{self._run.id}: {event} (attempt {last.number}: {last.ending.value}). {last.message}".strip()
        message = notify.Message(
            event=event,
            run=self._run.id,
            text=text,
            job_id=last.job_id,
            attempt=last.number,
            ending=last.ending.value,
            exit_code=last.exit_code,
            saved_step=last.saved_after,
        )
        notify.send(self._config.notify, message, self._say)

    def _requeue(self, number: int, ending: Ending, saved: int | None, without: Sequence[str]) -> int:
        self._tell("requeued")  # before: a requeue ends this process soon
        try:
            return self._allocation.requeue(without)
        except CommandError as error:
            message = f"requeue refused: {error}"
            self._ledger.end(number, ending, saved_after=saved, exit_code=int(ExitCode.REQUEUE), message=message)
            self._say(f"{message}. Go on with: clusterrun resume {self._run.root}")
            return int(ExitCode.REQUEUE)

    def _by_policy(self) -> bool:
        return self._config.preflight.on_shortage is OnShortage.requeue

    def _may_try_other_nodes(self, result: Result) -> bool:
        """By policy, or because nodes were lost; not more often than attempts may stall, and not at their expense."""
        if not (self._by_policy() or (result.requeue and self._config.recovery.requeue)):
            return False
        short = 0
        for attempt in reversed(self._ledger.attempts()[:-1]):
            if attempt.ending is not Ending.not_enough_nodes:
                break
            short += 1
        return short < self._config.recovery.max_stalled_attempts

    def give_up(self, why: str) -> int:
        last = self._ledger.attempts()[-1]
        message = f"{why}, the last: {last.ending.value}. {last.message}"
        self._ledger.end(
            last.number,
            last.ending,
            saved_after=self._store.latest_step(),
            exit_code=int(ExitCode.NO_PROGRESS),
            message=message,
            error=last.error,
            step=last.step,
        )
        self._say(f"no progress: {message}")
        return int(ExitCode.NO_PROGRESS)
