"""What NCCL said of a run, for its summary: a line of what was used, and one per silent fall-back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from clusterrun.config import frozen
from clusterrun.config.schema import RunConfig
from clusterrun.config.user_dirs import user_config_dirs
from clusterrun.cost.catalog import Catalog
from clusterrun.nccl.findings import fallbacks, unclear, used
from clusterrun.nccl.log import read
from clusterrun.rundir import AttemptDir, RunDir

FELL_BACK = "NCCL: fell back:"

_BYTES_PER_FILE = 1 << 20  # connections are set up at the start
_FILES = 256  # more say nothing new, and shared storage is slow


def nccl_lines(attempt: AttemptDir, config: RunConfig) -> list[str]:
    """Nothing at all for a run without NCCL. Those that say FELL_BACK are slower than declared."""
    files = attempt.nccl_logs()
    if not files:
        return []
    log = read(_lines(files[:_FILES]))
    lines = [f"NCCL: {used(log)}" + (f" (of {_FILES} of {len(files)} ranks)" if len(files) > _FILES else "")]
    lines += [f"{FELL_BACK} {one}" for one in fallbacks(log, config, Catalog(user_config_dirs()))]
    if why := unclear(log):
        lines.append(f"NCCL: what was used is not known: {why}")
    return lines + [f"NCCL warned: {text}" for text in log.warnings]


def last_nccl_lines(run: RunDir) -> list[str]:
    """Of the newest attempt that has NCCL's logs."""
    written = [attempt for attempt in run.all_attempts() if attempt.nccl_logs()]
    return nccl_lines(written[-1], frozen.load(run.config)) if written else []


def _lines(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        try:
            with file.open("rb") as opened:
                text = opened.read(_BYTES_PER_FILE).decode(errors="replace")
        except OSError:  # gone meanwhile
            continue
        yield from text.splitlines()
