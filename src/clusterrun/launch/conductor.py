"""The one process per run that drives every step: preflight, training, and what follows from how training ended.

It lives on the job's first node (or on the laptop), owns the signals, and is the ledger's only writer.
"""

from __future__ import annotations

import json
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
from clusterrun.config.schema import Executor, RunConfig
from clusterrun.errors import CommandError, ExitCode
from clusterrun.launch import outcome as outcomes
from clusterrun.launch.allocation import Allocation, allocation_for
from clusterrun.launch.outcome import How, Outcome, StepEnd, judge
from clusterrun.launch.plan import preflight_argv, training_argv, training_environment
from clusterrun.launch.resources import signal_lead_s
from clusterrun.launch.steps import Step, StepSpec
from clusterrun.ledger import Ending, Ledger
from clusterrun.preflight import report as reports
from clusterrun.preflight.checks import check_all
from clusterrun.preflight.decide import decide
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import Decision, NodeReport, Verdict
from clusterrun.rundir import AttemptDir, RunDir, write_durably

_POLL_S = 0.05
_STOP_REPEAT_S = 10.0
# Share of cluster.signal_lead_s that the workers have for saving; the rest is for ending them and for the requeue.
_SAVE_SHARE = 0.75
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
            decision, chosen = self._preflight(attempt)
            if self._signals:
                return self._allocation.why_stopped(self._signals), "told to stop during preflight", False
            if len(decision.chosen) < self._config.cluster.nodes:
                why = "; ".join(f"{node}: {reason}" for node, reason in decision.bad.items())
                message = f"{len(decision.chosen)} of {self._config.cluster.nodes} nodes healthy. {why}"
                return (Ending.not_enough_nodes if decision.chosen else Ending.preflight_refused), message, False
            self._ledger.chose(attempt.number, list(decision.chosen))
            end = self._train(attempt, chosen)
            if end.how is How.port_taken and port_try + 1 < _PORT_TRIES:
                self._say(f"{end.outcome.message if end.outcome else 'port taken'}; trying another")
                continue
            return *self._explain(end), end.outcome is not None and end.outcome.saved
        raise AssertionError("unreachable")

    def _preflight(self, attempt: AttemptDir) -> tuple[Decision, list[NodeReport]]:
        """Ask every node, judge, choose. Returns the decision and the reports of the chosen nodes in their order."""
        steps, settings = self._allocation.steps, self._config.preflight
        nodes = steps.nodes()
        out, err = attempt.step_output("preflight")
        argv = preflight_argv(self._config, self._run, attempt.number, steps.head_address())
        begin = time.time()
        seen = out.stat().st_size if out.exists() else 0
        step = steps.start(StepSpec("preflight", nodes, argv, out, err))
        deadline = time.monotonic() + settings.timeout_s
        while step.poll() is None and time.monotonic() < deadline:
            if self._signals or len(_frames(reports.FRAME, out, seen)) == len(nodes):
                break  # all have answered; srun itself takes a moment longer to end
            time.sleep(_POLL_S)
        answers = {n: NodeReport.from_json(v) for n, v in _frames(reports.FRAME, out, seen).items() if n in nodes}
        window = (begin, time.time())
        findings = check_all(Evidence(tuple(nodes), answers, self._config.cluster, settings, window))
        decision = decide(nodes, findings, self._config.cluster.nodes, settings)
        if len(answers) < len(nodes):
            step.kill()
        for node in nodes:
            value = {
                "report": answers[node].__dict__ if node in answers else None,
                "findings": [f.as_json() for f in findings if f.node == node],
                "chosen": node in decision.chosen,
            }
            write_durably(attempt.report(node), json.dumps(value, indent=1))
        for finding in findings:
            if finding.verdict is not Verdict.PASS:
                self._say(f"preflight: {finding}")
        self._say(
            f"preflight: {len(answers)} of {len(nodes)} nodes answered in {window[1] - begin:.1f} s; "
            f"chosen: {', '.join(decision.chosen) or 'none'}"
        )
        _wait(step, 10.0)
        return decision, [answers[node] for node in decision.chosen]

    def _train(self, attempt: AttemptDir, chosen: list[NodeReport]) -> StepEnd:
        head, nodes = chosen[0], [report.node for report in chosen]
        out, err = attempt.step_output("training")
        seen = out.stat().st_size if out.exists() else 0
        endpoint = f"{head.address}:{head.port}"
        argv = training_argv(self._config, self._run, attempt.number, endpoint, secrets.token_hex(16))
        self._say(f"training: attempt {attempt.number} on {', '.join(nodes)}, rendezvous at {endpoint}")
        step = self._allocation.steps.start(
            StepSpec("training", nodes, argv, out, err, training_environment(self._config))
        )
        self._watch(step)
        step.kill()  # nothing of it may live on into the next attempt
        said = {n: Outcome.from_json(v) for n, v in _frames(outcomes.FRAME, out, seen).items() if n in nodes}
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
            if first and now - first > _SAVE_SHARE * signal_lead_s(self._config):
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
            return self._allocation.requeue()
        except CommandError as error:
            self._ledger.end(
                number, ending, saved_after=saved, exit_code=int(ExitCode.REQUEUE), message=f"requeue refused: {error}"
            )
            self._say(f"requeue refused: {error}. Go on with: clusterrun resume {self._run.root}")
            return int(ExitCode.REQUEUE)

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


def _frames(kind: str, output: Path, offset: int) -> dict[str, dict[str, object]]:
    with output.open("rb") as file:
        file.seek(offset)
        return frames.decode(kind, file.read().decode(errors="replace").splitlines())


def _wait(step: Step, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while step.poll() is None and time.monotonic() < end:
        time.sleep(_POLL_S)
    if step.poll() is None:
        step.kill()


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
