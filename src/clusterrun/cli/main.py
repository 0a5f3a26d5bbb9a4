"""From arguments to a verb. Errors become one line and their exit code here, nowhere else."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from clusterrun import __version__
from clusterrun.cli.verbs import VERBS
from clusterrun.errors import ClusterrunError, ConfigError, ExitCode, choices, nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    gc.disable()
    atexit.register(gc.freeze)  # nothing left is worth a last collection, which takes longer than all our imports
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
        return _verb(argv[0])(argv[1:])
    if argv and "=" not in argv[0] and not argv[0].startswith(("-", "~", "+")):
        raise ConfigError(
            f"'{argv[0]}': neither a verb nor key=value.{nearest(argv[0], VERBS)} Verbs: {choices(VERBS)}"
        )
    return _verb("run")(argv)


def _verb(name: str) -> Callable[[list[str]], int]:
    """Imported when it is called: a verb costs the others nothing."""
    verb: Callable[[list[str]], int] = importlib.import_module(f"clusterrun.cli.{name}").main
    return verb
