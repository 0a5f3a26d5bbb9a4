"""What NCCL said of a run, for its summary: a line of what was used, and one per silent fall-back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from clusterrun.config.schema import ClusterConfig
from clusterrun.nccl.findings import fallbacks, unclear, used
from clusterrun.nccl.log import read
from clusterrun.rundir import AttemptDir

_BYTES_PER_FILE = 1 << 20  # connections are set up at the start
_FILES = 256  # more say nothing new, and shared storage is slow


def nccl_lines(attempt: AttemptDir, cluster: ClusterConfig) -> list[str]:
    """Nothing at all for a run without NCCL."""
    files = attempt.nccl_logs()
    if not files:
        return []
    log = read(_lines(files[:_FILES]))
    lines = [f"NCCL: {used(log)}" + (f" (of {_FILES} of {len(files)} ranks)" if len(files) > _FILES else "")]
    lines += [f"NCCL: fell back: {one}" for one in fallbacks(log, cluster)]
    if why := unclear(log):
        lines.append(f"NCCL: what was used is not known: {why}")
    return lines + [f"NCCL warned: {text}" for text in log.warnings]


def _lines(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        try:
            with file.open("rb") as opened:
                text = opened.read(_BYTES_PER_FILE).decode(errors="replace")
        except OSError:  # gone meanwhile
            continue
        yield from text.splitlines()
