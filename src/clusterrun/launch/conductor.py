"""The one process per run that drives every step: preflight, training, and what follows from how training ended.

It lives on the job's first node (or on the laptop), owns the signals, and is the ledger's only writer.
"""

from __future__ import annotations

import secrets
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from clusterrun import frames, process
from clusterrun.checkpoint.store import Store
from clusterrun.config import frozen
from clusterrun.config.grace import save_grace_s, signal_lead_s
from clusterrun.config.schema import Action, Executor, OnShortage, RunConfig
from clusterrun.errors import CommandError, ExitCode
from clusterrun.launch import exclusions
from clusterrun.launch import outcome as outcomes
from clusterrun.launch.allocation import Allocation, allocation_for
from clusterrun.launch.outcome import How, Outcome, StepEnd, judge
from clusterrun.launch.plan import step_environment, training_argv
from clusterrun.launch.preflight_step import Preflight, run_preflight
from clusterrun.launch.refusals import to_exclude
from clusterrun.launch.steps import Step, StepSpec
from clusterrun.ledger import Ending, Ledger
from clusterrun.preflight.report import NodeReport
from clusterrun.rundir import AttemptDir, RunDir

_POLL_S = 0.05
_STOP_REPEAT_S = 10.0
_PORT_TRIES = 3
_REQUEUED = (Ending.preempted, Ending.time_limit, Ending.requeued, Ending.stopped)


class Conductor:
    """One start of a run, from its first step to the exit code of the job."""

    def __init__(
        self, run: RunDir, config: RunConfig, allocation: Allocation, say: Callable[[str], None] = print
    ) -> None:
        self._run = run
        self._config = config
        self._allocation = allocation
        self._say = say
        self._ledger = Ledger(run.ledger)
        self._store = Store(run.checkpoints)
        self._signals: set[str] = set()

    def conduct(self) -> int:
        """Attempts until the run ends or has to be queued again; the exit code for the job."""
        for stop in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(stop, self._on_signal)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        while True:
            stalled = self._ledger.stalled(self._store.latest_step())
            if stalled >= self._config.recovery.max_stalled_attempts:
                return self._give_up(stalled)
            number = self._ledger.start(
                reason=self._reason(), job_id=self._allocation.job_id, saved_before=self._store.latest_step()
            )
            attempt = self._run.attempt(number)
            attempt.make()
            try:
                ending, message, saved = self._attempt(attempt)
            except Exception as error:  # the ledger must say how it ended, whatever it was
                traceback.print_exc()
                ending, message, saved = Ending.internal_error, f"{type(error).__name__}: {error}", False
            code = self._finish(number, ending, message, progressed=saved and self._config.train.script is not None)
            if code is not None:
                return code

    def _attempt(self, attempt: AttemptDir) -> tuple[Ending, str, bool]:
        """One start: how it ended, why, and whether the workers said that they saved."""
        for port_try in range(_PORT_TRIES):
            preflight = run_preflight(
                self._run,
                self._config,
                attempt,
                self._allocation.steps,
                say=self._say,
                told_to_stop=lambda: bool(self._signals),
            )
            if self._signals:
                return self._allocation.why_stopped(self._signals), "told to stop during preflight", False
            self._exclude(preflight)
            decision = preflight.decision
            why = "; ".join(f"{node}: {reason}" for node, reason in decision.bad.items())
            if self._config.action is Action.preflight:
                return (Ending.preflight_refused if decision.bad else Ending.done), why, False
            if len(decision.chosen) < self._config.cluster.nodes:
                message = f"{len(decision.chosen)} of {self._config.cluster.nodes} nodes healthy. {why}"
                return (Ending.not_enough_nodes if decision.chosen else Ending.preflight_refused), message, False
            self._ledger.chose(attempt.number, list(decision.chosen))
            end = self._train(attempt, preflight.chosen)
            if end.how is How.port_taken and port_try + 1 < _PORT_TRIES:
                self._say(f"{end.outcome.message if end.outcome else 'port taken'}; trying another")
                continue
            return *self._explain(end), end.outcome is not None and end.outcome.saved
        raise AssertionError("unreachable")

    def _exclude(self, preflight: Preflight) -> None:
        """Remember refused nodes, so that later submissions avoid them."""
        settings, cluster = self._config.preflight, self._config.cluster
        if cluster.executor is not Executor.slurm or not settings.exclude:
            return
        listed = exclusions.of(self._config)
        for entry in to_exclude(
            preflight.decision.findings, preflight.reports, settings, cluster=cluster.name, run_id=self._run.id
        ):
            listed.add(entry)
            self._say(f"{entry.node} is left out of later submissions for {settings.exclude_for_h:g} h: {entry.reason}")

    def _train(self, attempt: AttemptDir, chosen: list[NodeReport]) -> StepEnd:
        head, nodes = chosen[0], [report.node for report in chosen]
        out, err = attempt.step_output("training")
        reader = frames.FileReader(outcomes.FRAME, out)
        endpoint = f"{head.address}:{head.port}"
        argv = training_argv(self._config, self._run, attempt.number, endpoint, secrets.token_hex(16))
        what = "training" if self._config.action is Action.train else self._config.action.value
        self._say(f"{what}: attempt {attempt.number} on {', '.join(nodes)}, rendezvous at {endpoint}")
        step = self._allocation.steps.start(StepSpec("training", nodes, argv, out, err, step_environment(self._config)))
        self._watch(step)
        step.kill()  # nothing of it may live on into the next attempt
        reader.poll()
        said = {n: Outcome.from_json(v) for n, v in reader.messages().items() if n in nodes}
        return judge(nodes, said)

    def _watch(self, step: Step) -> None:
        """Until the step has ended. A signal is passed on; workers that then take too long are given up.

        Too long: what is left must do for the requeue, since a job that runs into its time limit is not requeued.
        """
        first = last = 0.0
        while step.poll() is None:
            now = time.monotonic()
            if self._signals and now - last > _STOP_REPEAT_S:
                first, last = first or now, now
                self._say(f"got {', '.join(sorted(self._signals))}: asking the workers to save and stop")
                step.ask_to_stop()
            if first and now - first > save_grace_s(self._config):
                self._say(f"the workers did not stop within {now - first:.0f} s: ending them")
                return
            time.sleep(_POLL_S)

    def _explain(self, end: StepEnd) -> tuple[Ending, str]:
        """The ledger's word for how a training step ended."""
        where = f"{end.node}: " if end.node else ""
        rank = f"rank {end.outcome.rank}: " if end.outcome and end.outcome.rank is not None else ""
        said = end.outcome.message if end.outcome else ""
        if end.how is How.done:
            return Ending.done, ""
        if self._signals or end.how is How.stopped:
            why = self._allocation.why_stopped(self._signals)
            saved = end.outcome is not None and end.outcome.saved
            return why, "state saved" if saved else f"nothing was saved. {where}{rank}{said}".strip()
        if end.lost:
            return Ending.node_lost, f"no word from {', '.join(end.lost)}"
        if end.how is How.failed:
            code = end.outcome.exit_code if end.outcome else None
            return Ending.user_code_failed, f"{where}{rank}{said} (exit code {code})"
        return Ending.crashed, f"{where}{rank}{said}"

    def _finish(self, number: int, ending: Ending, message: str, *, progressed: bool) -> int | None:
        """Write the end of an attempt. Returns the job's exit code, or None to start the next attempt right here."""
        saved = self._store.latest_step()
        code = _EXIT_CODES.get(ending)
        if ending is Ending.not_enough_nodes and self._may_try_other_nodes():
            self._ledger.end(number, ending, saved_after=saved, message=message)
            self._say(f"attempt {number}: {ending.value}, queued again without the refused nodes. {message}")
            return self._allocation.requeue([entry.node for entry in exclusions.of(self._config).all()])
        if ending in _REQUEUED and not self._config.recovery.requeue:
            code = ExitCode.REQUEUE
        if code is not None:
            self._ledger.end(number, ending, saved_after=saved, exit_code=int(code), message=message)
            self._say(f"attempt {number}: {ending.value}. {message}")
            return int(code)
        self._ledger.end(number, ending, saved_after=saved, progressed=progressed, message=message)
        self._say(f"attempt {number}: {ending.value}, newest checkpoint: step {saved}. {message}")
        if ending not in _REQUEUED:
            return None
        stalled = self._ledger.stalled(saved)
        if stalled >= self._config.recovery.max_stalled_attempts:
            return self._give_up(stalled)
        try:
            return self._allocation.requeue([])
        except CommandError as error:
            self._ledger.end(
                number, ending, saved_after=saved, exit_code=int(ExitCode.REQUEUE), message=f"requeue refused: {error}"
            )
            self._say(f"requeue refused: {error}. Go on with: clusterrun resume {self._run.root}")
            return int(ExitCode.REQUEUE)

    def _may_try_other_nodes(self) -> bool:
        """By policy, and not more often than the attempts that may stall: this does not touch the retry budget."""
        if self._config.preflight.on_shortage is not OnShortage.requeue:
            return False
        short = 0
        for attempt in reversed(self._ledger.attempts()[:-1]):
            if attempt.ending is not Ending.not_enough_nodes:
                break
            short += 1
        return short < self._config.recovery.max_stalled_attempts

    def _give_up(self, stalled: int) -> int:
        last = self._ledger.attempts()[-1]
        message = (
            f"{stalled} attempts in a row without a newer checkpoint, the last: {last.ending.value}. {last.message}"
        )
        self._ledger.end(
            last.number,
            last.ending,
            saved_after=self._store.latest_step(),
            exit_code=int(ExitCode.NO_PROGRESS),
            message=message,
        )
        self._say(f"no progress: {message}")
        return int(ExitCode.NO_PROGRESS)

    def _reason(self) -> str:
        before = self._ledger.attempts()
        if not before:
            return "first start"
        return f"after {before[-1].ending.value}"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.add(signal.Signals(number).name)


_EXIT_CODES = {
    Ending.done: ExitCode.DONE,
    Ending.user_code_failed: ExitCode.USER_CODE_FAILED,
    Ending.internal_error: ExitCode.USER_CODE_FAILED,
    Ending.preflight_refused: ExitCode.PREFLIGHT_REFUSED,
    Ending.not_enough_nodes: ExitCode.NOT_ENOUGH_NODES,
    Ending.cancelled: ExitCode.CANCELLED,
}


class Entry:
    """What submitit pickles and runs: the run directory's path and nothing else.

    Slurm replays the same pickle on every requeue; what to do is decided at start, from what is on disk.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def __call__(self) -> None:
        run = RunDir.open(Path(self.run_dir))
        config = frozen.load(run.config)
        if config.cluster.executor is Executor.local:
            process.signal_when_parent_dies(signal.SIGTERM)  # nobody else would end a run whose controller is gone
        allocation = allocation_for(config.cluster, signal_lead_s(config))
        raise SystemExit(Conductor(run, config, allocation, say=_say).conduct())


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} clusterrun: {text}", flush=True)
