"""The command line: parse, call one function, print. Errors become one line and their exit code here, nowhere else."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from clusterrun import __version__
from clusterrun.errors import ClusterrunError, ConfigError, ExitCode, choices, nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from clusterrun.config.schema import RunConfig
    from clusterrun.launch.submit import Submitted

USAGE = "clusterrun [VERB] [OVERRIDES]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    gc.disable()
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(argv)
    except ClusterrunError as error:
        print(f"clusterrun: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.CANCELLED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is quiet too
        return 0


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == ["--version"]:
        print(f"clusterrun {__version__}")
        return 0
    if argv and argv[0] in VERBS:
        return VERBS[argv[0]](argv[1:])
    if argv and "=" not in argv[0] and not argv[0].startswith(("-", "~", "+")):
        raise ConfigError(
            f"'{argv[0]}': neither a verb nor key=value.{nearest(argv[0], VERBS)} Verbs: {choices(VERBS)}"
        )
    return _run(argv)


def _run(argv: list[str]) -> int:
    """Submit one run, or with -m one per point."""
    if "-sc" in argv or "--shell-completion" in argv:
        # Hydra completes overrides; it knows nothing of verbs.
        typed = os.environ.get("COMP_LINE", "")
        if not typed and any(a.startswith("query=") for a in argv):
            raise ConfigError(
                '--shell-completion query: shells ask this; set up with: eval "$(clusterrun -sc install=bash)"'
            )
        os.environ["COMP_LINE"] = re.sub(rf"^(\S+\s+)(?:{'|'.join(VERBS)})\s+", r"\1", typed)
    return _over_configs(argv, _submit_one)


def _plan(argv: list[str]) -> int:
    parser = _parser(
        "plan",
        "Show what would be submitted, and submit nothing.",
        "clusterrun plan +cluster=a100_nvswitch train=ddp_linear",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    options, overrides = parser.parse_known_args(argv)

    def show(config: RunConfig) -> int:
        from clusterrun.launch.plan import plan_next
        from clusterrun.report.plan_view import plan_text

        plan = plan_next(config).as_json()
        bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(json.dumps(plan, indent=1) if options.json else plan_text(plan, bold=bold))
        return 0

    return _over_configs(overrides, show)


def _resume(argv: list[str]) -> int:
    parser = _parser(
        "resume",
        "Go on with a run that stopped, from its newest checkpoint.",
        "clusterrun resume ddp_linear-laptop-1a2b3c4d",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, run id, or the beginning of an id")
    parser.add_argument(
        "--shared-dir", type=Path, help="where runs are (default: CLUSTERRUN_SHARED_DIR or ~/clusterrun)"
    )
    parser.add_argument(
        "--wait", action=argparse.BooleanOptionalAction, help="follow the run (default on this machine)"
    )
    options = parser.parse_args(argv)
    from clusterrun.launch.submit import find_run, resume
    from clusterrun.rundir import default_shared_dir

    shared = options.shared_dir.expanduser() if options.shared_dir else default_shared_dir()
    submitted = resume(find_run(options.run, [shared]))
    return _announce(submitted, options.wait)


def _preflight(argv: list[str]) -> int:
    parser = _parser(
        "preflight",
        "Check every node of a cluster, and train nothing. Exit 3 when a check is fatal on any node.",
        "clusterrun preflight +cluster=a100_nvswitch cluster.nodes=4",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    options, overrides = parser.parse_known_args(argv)

    def check(config: RunConfig) -> int:
        from rich.console import Console

        from clusterrun.launch.submit import submit
        from clusterrun.report import preflight_view

        submitted = submit(config)
        code = _wait_quietly(submitted)
        results = preflight_view.read_results(submitted.run.all_attempts()[-1])
        if options.json:
            print(json.dumps(preflight_view.as_json(results), indent=1))
        else:
            preflight_view.show(results, Console(highlight=False))
        return code

    return _over_configs([*overrides, "action=preflight"], check)


def _nodes(argv: list[str]) -> int:
    parser = _parser(
        "nodes",
        "List the nodes that preflight refused, or take one off the list: nodes forgive NAME.",
        "clusterrun nodes +cluster=a100_nvswitch; clusterrun nodes forgive c3 +cluster=a100_nvswitch",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    options, rest = parser.parse_known_args(argv)
    forgiven = rest[1] if rest[:1] == ["forgive"] and len(rest) > 1 else None
    if rest[:1] == ["forgive"] and forgiven is None:
        raise ConfigError("nodes forgive: the name of a node must follow, e.g. clusterrun nodes forgive c3")

    def show(config: RunConfig) -> int:
        from dataclasses import asdict

        from rich.console import Console

        from clusterrun.config.validate import validated
        from clusterrun.launch import exclusions
        from clusterrun.report import preflight_view

        listed = exclusions.of(validated(config))
        if forgiven is not None:
            if not listed.forgive(forgiven):
                raise ConfigError(f"nodes forgive {forgiven}: not on the list of cluster {listed.cluster}")
            print(f"{forgiven} is off the list of cluster {listed.cluster}")
        elif options.json:
            print(json.dumps([asdict(entry) for entry in listed.all()], indent=1))
        else:
            preflight_view.show_exclusions(listed.all(), listed.cluster, Console(highlight=False))
        return 0

    return _over_configs(rest[2:] if forgiven is not None else rest, show)


def _topo(argv: list[str]) -> int:
    from clusterrun.report.topology_table import main as topology_command

    return topology_command(argv)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "nodes": _nodes,
    "plan": _plan,
    "preflight": _preflight,
    "resume": _resume,
    "topo": _topo,
}


def _submit_one(config: RunConfig) -> int:
    from clusterrun.launch.submit import submit

    return _announce(submit(config), config.wait)


def _announce(submitted: Submitted, wait: bool | None) -> int:
    """Say what was submitted and what to type next; follow it when asked to."""
    from rich.console import Console

    from clusterrun.config.schema import Executor
    from clusterrun.launch import jobs

    console = Console(highlight=False)
    run, job, local = submitted.run, submitted.job, submitted.config.cluster.executor is Executor.local
    r, batch = submitted.plan.resources, submitted.plan.batch
    console.print(f"submitted {run.id} as {'process' if local else 'job'} {job.job_id}", markup=False)
    console.print(f"  directory  {run.root}", markup=False, soft_wrap=True)
    console.print(f"  world size {r.world_size}: {r.nodes} nodes x {r.nproc_per_node} workers", markup=False)
    if batch:
        console.print(f"  batch      {batch.global_} samples per step, {batch.per_rank} per rank", markup=False)
    if not (local if wait is None else wait):
        if not local:
            console.print(f"  queue      squeue --jobs {job.job_id}", markup=False)
        console.print(f"  log        tail -f {run.submitit}/{job.job_id}_0_log.out", markup=False, soft_wrap=True)
        console.print(f"  cancel     {jobs.how_to_cancel(job)}", markup=False)
        return 0
    return _follow(submitted)


def _state_of(submitted: Submitted) -> Callable[[], tuple[str, str]]:
    from clusterrun.launch import jobs

    def state() -> tuple[str, str]:
        now, reason = jobs.state_of(submitted.job)
        return now.value, reason

    return state


def _wait_quietly(submitted: Submitted) -> int:
    """Follow a run on standard error; standard output is for the result."""
    from rich.console import Console

    from clusterrun.report.follow import follow

    followed = follow(submitted.run, submitted.attempts_before, _state_of(submitted), Console(stderr=True))
    if not submitted.run.all_attempts():
        raise ClusterrunError(f"{submitted.run.id}: {followed.message}")
    return followed.exit_code


def _follow(submitted: Submitted) -> int:
    from rich.console import Console

    from clusterrun.config.schema import Executor
    from clusterrun.launch import jobs
    from clusterrun.report.follow import follow, summary

    console = Console(highlight=False)
    run, job, state = submitted.run, submitted.job, _state_of(submitted)

    try:
        followed = follow(run, submitted.attempts_before, state, console)
    except KeyboardInterrupt:
        if submitted.config.cluster.executor is Executor.slurm:
            console.print(
                f"\nno longer following; the job goes on. Cancel it with: {jobs.how_to_cancel(job)}", markup=False
            )
            return int(ExitCode.CANCELLED)
        console.print(
            "\nstopping: the workers save at their next step (Ctrl-C again to leave them to it)", markup=False
        )
        jobs.cancel(job)
        followed = follow(run, submitted.attempts_before, state, console)
    for line in summary(run, followed):
        console.print(line, markup=False, soft_wrap=True)
    return followed.exit_code


def _over_configs(arguments: list[str], each: Callable[[RunConfig], int]) -> int:
    """Call ``each`` with every configuration the arguments mean (several with -m). The largest exit code wins.

    A point that is wrong is reported and does not hide the others.
    """
    from clusterrun.config.compose import compose, run_hydra_app, to_run_config

    if not any(a.startswith("-") for a in arguments):
        return each(compose(arguments))  # the same configuration as through Hydra's app, in half the time
    codes = [0]

    def task(composed: DictConfig) -> None:
        try:
            codes.append(each(to_run_config(composed)))
        except ClusterrunError as error:
            print(f"clusterrun: {error}", file=sys.stderr)
            codes.append(int(error.exit_code))

    with tempfile.TemporaryDirectory(prefix="clusterrun-sweep-") as scratch:
        multirun = any(a in ("-m", "--multirun") for a in arguments)
        # Hydra's sweeper writes a multirun.yaml; it goes where nobody sees it.
        places = [f"hydra.sweep.dir={scratch}", "hydra.sweep.subdir=${hydra.job.num}"] if multirun else []
        run_hydra_app([*arguments, *places], task)
    return max(codes)


class _Parser(argparse.ArgumentParser):
    """argparse, with errors like all others: one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser(verb: str, description: str, example: str) -> argparse.ArgumentParser:
    return _Parser(
        prog=f"clusterrun {verb}",
        description=description,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
