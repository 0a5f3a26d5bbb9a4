"""What the verbs share: a parser whose errors are one line, and the configurations that arguments mean."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from clusterrun.errors import ClusterrunError, ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from clusterrun.config.schema import RunConfig


def over_configs(arguments: list[str], each: Callable[[RunConfig], int]) -> int:
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


def is_sweep(argv: Sequence[str]) -> bool:
    """Whether the arguments ask for a sweep that is to be run, and not for Hydra's help or the like."""
    flags = {a for a in argv if a.startswith("-")}
    return bool(flags & {"-m", "--multirun"}) and not flags - {"-m", "--multirun"}


class VerbParser(argparse.ArgumentParser):
    """argparse, with errors like all others: one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def verb_parser(verb: str, description: str, example: str) -> argparse.ArgumentParser:
    return VerbParser(
        prog=f"clusterrun {verb}",
        description=description,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_shared_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shared-dir", type=Path, help="where runs are (default: CLUSTERRUN_SHARED_DIR or ~/clusterrun)"
    )


def shared_dir(options: argparse.Namespace) -> Path:
    """Where the runs are that the verb is about."""
    from clusterrun.rundir import default_shared_dir

    given: Path | None = options.shared_dir
    return given.expanduser().absolute() if given else default_shared_dir()


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
