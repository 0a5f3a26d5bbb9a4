"""``clusterrun logs``: the first error of a run, or the output of its ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from clusterrun.cli.common import add_shared_dir, shared_dir, verb_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterrun.ledger import Attempt
    from clusterrun.operate.logs import LogFile, RankError
    from clusterrun.rundir import RunDir


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "logs",
        "The first error of the attempt that failed, with its rank. With --rank or --node: what those printed.",
        "clusterrun logs last; clusterrun logs last --rank 3; clusterrun logs last -f",
    )
    parser.add_argument("run", metavar="RUN", help="id, the beginning of one, a path, or last")
    parser.add_argument("--rank", type=int, help="what this rank printed")
    parser.add_argument("--node", help="what the ranks of this node printed")
    parser.add_argument("--attempt", type=int, help="of this attempt (default: the newest that failed, or the newest)")
    parser.add_argument("-f", "--follow", action="store_true", help="as it is written (rank 0 unless told otherwise)")
    parser.add_argument("--errors", action="store_true", help="every different error, each once with its ranks")
    add_shared_dir(parser)
    options = parser.parse_args(argv)
    from clusterrun.operate import logs
    from clusterrun.operate.find import find_one

    run = find_one(options.run, shared_dir(options)).run
    if options.follow:
        return _follow(run, options.rank, options.node, options.attempt)
    attempt = logs.pick_attempt(run, options.attempt)
    if options.rank is not None or options.node is not None:
        return _print_whole(logs.log_files(run.attempt(attempt.number), options.rank, options.node))
    errors = logs.errors_of(run, attempt)
    print(_headline(run, attempt))
    from clusterrun.config import frozen
    from clusterrun.report.nccl_used import FELL_BACK, nccl_lines

    said = nccl_lines(run.attempt(attempt.number), frozen.load(run.config))
    for line in said if options.errors else [line for line in said if line.startswith(FELL_BACK)]:
        print(line)
    if errors:
        for error in errors if options.errors else errors[:1]:
            _print_error(error)
        if not options.errors and len(errors) > 1:
            print(f"\n{len(errors) - 1} other errors came after it: clusterrun logs {run.id} --errors")
        return 0
    if options.errors:
        print("no errors")
        return 0
    for file, lines in logs.last_lines(logs.log_files(run.attempt(attempt.number), 0)):
        print(f"\nend of {file.label}  ({file.path})")
        print("\n".join(lines))
    return 0


def _headline(run: RunDir, attempt: Attempt) -> str:
    how = "still running" if attempt.is_open else attempt.ending.value.replace("_", " ")
    when = "" if attempt.ended is None else time.strftime(", %Y-%m-%d %H:%M:%S", time.localtime(attempt.ended))
    return f"{run.id}, attempt {attempt.number} on {', '.join(attempt.nodes) or 'no nodes yet'}: {how}{when}"


def _print_error(error: RankError) -> None:
    who = (
        "the conductor says" if error.rank is None else f"rank {error.rank}{f' on {error.node}' if error.node else ''}"
    )
    when = "" if error.time is None else time.strftime(" at %H:%M:%S", time.localtime(error.time))
    others = [rank for rank in error.ranks if rank != error.rank]
    same = f" (the same on {len(others)} more: rank {_ranges(others)})" if others else ""
    print(f"\n{who}{when}: {error.message}{same}")
    if error.text and error.text.strip() != error.message:
        print("\n".join(f"  {line}" for line in error.text.splitlines()))
    if error.log is not None:
        print(f"  log: {error.log}")


def _ranges(numbers: Sequence[int]) -> str:
    """1-3,7"""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _print_whole(files: Sequence[LogFile]) -> int:
    for number, file in enumerate(files):
        text = file.path.read_text(errors="replace")
        if not text.strip():
            continue
        if len(files) > 1:
            print(f"{chr(10) if number else ''}{file.label}  ({file.path})")
        print(text, end="" if text.endswith("\n") else "\n")
    return 0


def _follow(run: RunDir, rank: int | None, node: str | None, number: int | None) -> int:
    from clusterrun.errors import RunError
    from clusterrun.operate import logs
    from clusterrun.operate.find import Found
    from clusterrun.operate.status import status_of

    wanted = 0 if rank is None and node is None else rank

    before = run.all_attempts()[:-1]  # of no interest any more; whatever comes after them is

    def files() -> list[LogFile]:
        places = run.all_attempts()[len(before) :] if number is None else [run.attempt(number)]
        found: list[LogFile] = []
        for place in places:
            try:
                found += logs.log_files(place, wanted, node)
            except RunError:  # that rank has not started yet
                continue
        return found

    def has_ended() -> bool:
        (row,) = status_of([Found(run)])
        over = number is not None and number < row.attempts  # that attempt writes no more
        return row.state.is_over or over

    def say(file: LogFile, line: str) -> None:
        print(line if wanted is not None else f"{file.node}.{file.rank}: {line}", flush=True)

    logs.follow(files, has_ended, say)
    return 0
