"""The one process per run that drives every step: preflight, training, and what follows from how training ended.

It lives on the job's first node (or on the laptop), owns the signals, and is the ledger's only writer.
"""

from __future__ import annotations

import secrets
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

from clusterrun import fence
from clusterrun.checkpoint.store import Store
from clusterrun.config.batch import batch_sizes
from clusterrun.config.grace import save_grace_s
from clusterrun.config.schema import Action, Executor, RunConfig
from clusterrun.errors import CommandError, ConfigError, ExitCode
from clusterrun.fence import Claim, Fence, FencedError
from clusterrun.launch import exclusions
from clusterrun.launch.allocation import Allocation
from clusterrun.launch.commands import step_environment, training_argv
from clusterrun.launch.explain import Result, explain
from clusterrun.launch.finish import Finish
from clusterrun.launch.hang import Blame
from clusterrun.launch.outcome import How, StepEnd, judge
from clusterrun.launch.preflight_step import Preflight, run_preflight
from clusterrun.launch.refusals import to_exclude
from clusterrun.launch.srun import why_no_step
from clusterrun.launch.steps import Step, StepSpec
from clusterrun.launch.stragglers import Straggler
from clusterrun.launch.watch import StepWatch
from clusterrun.ledger import STORAGE_ERRORS, Ending, Ledger
from clusterrun.preflight.report import NodeReport
from clusterrun.rundir import AttemptDir, RunDir

_POLL_S = 0.05
_STOP_REPEAT_S = 10.0
_PORT_TRIES = 3
# How long the shared directory may fail before a conductor that can't read the fence gives up, seconds.
_STORAGE_PATIENCE_S = 600.0
_STORAGE_PAUSE_S = 20.0


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
        self._finish = Finish(run, config, allocation, self._ledger, self._store, say)
        self._signals: set[str] = set()
        self._fence = Fence(run.fence)
        self._claim: Claim | None = None
        # Nodes of this allocation that Slurm lost or that nobody can reach: not used again.
        self._lost: set[str] = set()
        # Those whose agent vanished: used again only when there are no others.
        self._suspects: set[str] = set()

    def conduct(self) -> int:
        """Attempts until the run ends or has to be queued again; the exit code for the job."""
        for stop in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(stop, self._on_signal)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        try:
            code = self._attempts()
            self._finish.tell_end(code)
            return code
        except FencedError as error:
            # Cut off from the scheduler, which has started the run elsewhere. Nothing here is ours any more.
            self._say(f"{error}; this one ends")
            return int(ExitCode.REQUEUE)
        finally:
            self._allocation.leave()

    def _attempts(self) -> int:
        queued_since = self._allocation.queued_since()
        while True:
            self._still_ours()
            if self._claim is not None and self._allocation.is_gone():
                # Slurm lost the head node and this process outlived it: the run goes on elsewhere.
                self._say("the scheduler has taken this job back; this conductor ends")
                return int(ExitCode.REQUEUE)
            self._still_ours()  # the scheduler may have been long in answering
            stalled = self._ledger.stalled(self._store.latest_step())
            if stalled >= self._config.recovery.max_stalled_attempts:
                return self._finish.give_up(f"{stalled} attempts in a row without a newer checkpoint")
            number = self._ledger.start(
                reason=self._reason(),
                job_id=self._allocation.job_id,
                saved_before=self._store.latest_step(),
                queued_since=queued_since,
            )
            self._claim, queued_since = self._fence.take(number), None
            attempt = self._run.attempt(number)
            attempt.make()
            try:
                result = self._attempt(attempt)
            except FencedError:
                raise
            except Exception as error:  # the ledger must say how it ended, whatever it was
                if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
                    self._say(f"{error}: trying again in {_STORAGE_PAUSE_S:g} s")
                    time.sleep(_STORAGE_PAUSE_S)
                    result = Result(Ending.crashed, str(error))
                else:
                    traceback.print_exc()
                    result = Result(Ending.internal_error, f"{type(error).__name__}: {error}")
            self._still_ours()
            code = self._finish.finish(number, result)
            if code is not None:
                return code

    def _still_ours(self) -> None:
        """Before anything that belongs to all attempts is changed. Raises FencedError."""
        end = time.monotonic() + _STORAGE_PATIENCE_S
        while self._claim is not None:
            try:
                return self._fence.check(self._claim)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(1.0)
        return None

    def _attempt(self, attempt: AttemptDir) -> Result:
        """One start."""
        for port_try in range(_PORT_TRIES):
            nodes = self._usable_nodes()
            if self._lost and nodes_to_go_on_with(self._config, len(nodes)) is None:
                message = f"{len(nodes)} nodes are left without {', '.join(sorted(self._lost))}"
                return Result(Ending.not_enough_nodes, message, requeue=True)
            preflight = run_preflight(
                self._run,
                self._config,
                attempt,
                self._allocation.steps,
                say=self._say,
                told_to_stop=lambda: bool(self._signals),
                nodes=nodes,
            )
            if self._signals:
                return Result(self._allocation.why_stopped(self._signals), "told to stop during preflight")
            if not preflight.reports and (problem := self._no_step(attempt)):
                return Result(Ending.not_enough_nodes, f"no step can be started here: {problem}", requeue=True)
            self._exclude(preflight)
            decision = preflight.decision
            why = "; ".join(f"{node}: {reason}" for node, reason in decision.bad.items())
            if self._config.action is Action.preflight:
                return Result(Ending.preflight_refused if decision.bad else Ending.done, why)
            wanted, chosen = self._config.cluster.nodes, preflight.chosen
            if len(chosen) < wanted:
                message = f"{len(chosen)} of {wanted} nodes healthy. {why}"
                count = nodes_to_go_on_with(self._config, len(chosen))
                if count is None:
                    refused = Ending.not_enough_nodes if chosen else Ending.preflight_refused
                    return Result(refused, message, requeue=self._has_lost_nodes())
                chosen = chosen[:count]
                self._notice(attempt.number, "fewer_nodes", f"going on with {count} nodes: {message}")
            self._ledger.chose(attempt.number, [report.node for report in chosen])
            self._still_ours()
            end, blame = self._train(attempt, chosen)
            if end.how is How.port_taken and port_try + 1 < _PORT_TRIES:
                self._say(f"{end.outcome.message if end.outcome else 'port taken'}; trying another")
                continue
            return explain(
                end,
                blame,
                self._signals,
                why_stopped=self._allocation.why_stopped,
                restart_on_error=self._config.recovery.restart_on_error,
            )
        raise AssertionError("unreachable")

    def _usable_nodes(self) -> list[str]:
        """The allocation's nodes, without those that vanished before as long as there are enough others."""
        nodes = [node for node in self._allocation.steps.nodes() if node not in self._lost]
        sound = [node for node in nodes if node not in self._suspects]
        return sound if len(sound) >= self._config.cluster.nodes else nodes

    def _no_step(self, attempt: AttemptDir) -> str | None:
        """Why Slurm starts no step in this allocation, though it did in an earlier one of this run: then it is not what
        was asked for, and another allocation may do. Slurm 22.05 can lose a job's GPUs when it queues the job again in
        the moment in which a node of the old allocation is given up ("Invalid generic resource (gres) specification").
        """
        if not any(before.nodes for before in self._ledger.attempts()[:-1]):
            return None
        return why_no_step(attempt.step_output("preflight")[1].read_text(errors="replace"))

    def _has_lost_nodes(self) -> bool:
        """Whether this allocation has become smaller than it was, so that a new one can do better."""
        cluster = self._config.cluster
        return bool(self._lost) or len(self._allocation.steps.nodes()) < cluster.nodes + cluster.spare_nodes

    def _notice(self, number: int, kind: str, message: str, node: str | None = None, rank: int | None = None) -> None:
        self._ledger.notice(number, kind, message, node=node, rank=rank)
        self._say(message)

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

    def _train(self, attempt: AttemptDir, chosen: Sequence[NodeReport]) -> tuple[StepEnd, Blame | None]:
        head, nodes = chosen[0], [report.node for report in chosen]
        out, err = attempt.step_output("training")
        assert self._claim is not None

        def tell(straggler: Straggler, node: str) -> None:
            self._notice(attempt.number, "straggler", f"{node}: {straggler}", node, straggler.rank)

        watch = StepWatch(self._config, nodes, out, err, nodes_left=self._allocation.steps.nodes, tell=tell)
        endpoint = f"{head.address}:{head.port}"
        argv = training_argv(self._config, self._run, attempt.number, endpoint, secrets.token_hex(16), len(nodes))
        env = {**step_environment(self._config), fence.NONCE: self._claim.nonce}
        what = "training" if self._config.action is Action.train else self._config.action.value
        self._say(f"{what}: attempt {attempt.number} on {', '.join(nodes)}, rendezvous at {endpoint}")
        step = self._allocation.steps.start(StepSpec("training", nodes, argv, out, err, env))
        try:  # not before: an allocation that has lost a node may be about to be given up
            self._allocation.watch_head(attempt, self._usable_nodes())
        except CommandError as error:
            self._say(f"nobody watches over this host: {error}")
        self._wait(step, watch)
        step.kill()  # nothing of it may live on into the next attempt
        end = judge(nodes, watch.outcomes())
        if watch.lost and end.how is not How.done:  # what the others said, or had no time to say, follows from it
            end = StepEnd(How.crashed, None, None, tuple(sorted(watch.lost)))
        self._lost |= watch.lost
        if watch.blame is None and len(end.lost) < len(nodes):
            self._suspects |= set(end.lost)
        if watch.blame is not None:
            self._lost |= set(watch.blame.silent)
            self._notice(attempt.number, "hung", watch.blame.message, watch.blame.node, watch.blame.rank)
        return end, watch.blame

    def _wait(self, step: Step, watch: StepWatch) -> None:
        """Until the step has ended, or can't go on. A signal is passed on; workers that take too long are given up.

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
            reason = watch.look()
            if reason is not None:
                self._say(f"ending the step: {reason}")
                return
            time.sleep(_POLL_S)

    def _reason(self) -> str:
        before = self._ledger.attempts()
        if not before:
            return "first start"
        return f"after {before[-1].ending.value}"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.add(signal.Signals(number).name)


def nodes_to_go_on_with(config: RunConfig, healthy: int) -> int | None:
    """The most nodes, of so many healthy ones, with which the run may go on by ``cluster.min_nodes``; None: too few.

    Enough are as many as configured. With train.global_batch the batch must divide over the ranks, so it may be fewer
    than are healthy.
    """
    if healthy >= config.cluster.nodes:
        return config.cluster.nodes
    least = config.cluster.min_nodes
    if least is None:
        return None
    for count in range(healthy, least - 1, -1):
        try:
            if config.train.task is not None:
                batch_sizes(config.train, count * config.cluster.nproc_per_node)
            return count
        except ConfigError:
            continue
    return None
