"""``clusterrun clean``: remove runs that ended long ago."""

from __future__ import annotations

import sys

from clusterrun.cli.common import add_quiet, add_shared_dir, shared_dir, verb_parser
from clusterrun.errors import ConfigError

_SHOWN = 20


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "clean",
        "Remove runs that ended long ago, with their checkpoints. Asks first; never touches one that lives.",
        "clusterrun clean --older-than 14d; clusterrun clean --older-than 0m --state failed --yes",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN|SWEEP", help="only these (default: all)")
    parser.add_argument("--older-than", default="30d", help="that ended so long ago: 12h, 30d (default: 30d)")
    parser.add_argument("--state", action="append", default=[], help="only done, failed, cancelled or stopped ones")
    parser.add_argument("--yes", action="store_true", help="don't ask")
    add_shared_dir(parser)
    add_quiet(parser)
    options = parser.parse_args(argv)
    from clusterrun.operate.control import removable, remove
    from clusterrun.operate.find import all_runs, find_runs
    from clusterrun.report.status_view import age

    _check_states(options.state)
    shared = shared_dir(options)
    found = find_runs(options.runs, shared) if options.runs else all_runs(shared)
    chosen = removable(found, _seconds(options.older_than))
    chosen = [r for r in chosen if not options.state or r.status.state.value in options.state]
    if not chosen:
        if not options.quiet:
            print(f"nothing to remove: no run in {shared} ended {options.older_than} ago or before")
        return 0
    if not options.quiet or not options.yes:
        for one in chosen[:_SHOWN]:
            ended = age(one.status.ended or one.status.submitted)
            print(f"{one.status.name}  {one.status.state.value}, {ended} ago, {_size(one.bytes)}")
        if len(chosen) > _SHOWN:
            print(f"... and {len(chosen) - _SHOWN} more")
    total = _size(sum(one.bytes for one in chosen))
    if not options.yes and not _agreed(f"Remove {len(chosen)} runs ({total}) with their checkpoints?"):
        print("nothing was removed")
        return 0
    gone = remove(chosen)
    if not options.quiet:
        print(f"removed {len(gone)} runs ({total})")
        if len(gone) < len(chosen):
            print(f"{len(chosen) - len(gone)} were left: they live again, or were changed meanwhile")
    return 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("clean: nobody to ask here (no terminal); give --yes")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _seconds(text: str) -> float:
    from clusterrun.config.units import time_limit_minutes

    if text.strip() in ("0", "0m", "0h", "0d"):
        return 0.0
    try:
        return 60.0 * time_limit_minutes(text)
    except ValueError as error:
        raise ConfigError(f"--older-than {text}: {error}") from None


def _check_states(states: list[str]) -> None:
    from clusterrun.errors import choices, nearest

    known = ("done", "failed", "cancelled", "stopped")
    for state in states:
        if state not in known:
            raise ConfigError(f"--state {state}: no such state.{nearest(state, known)} Known: {choices(known)}")


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
