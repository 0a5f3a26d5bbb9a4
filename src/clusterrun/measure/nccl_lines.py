"""The lines of nccl-tests and rccl-tests output: which kind each is, and what it says.

Formats: nccl-tests' src/common.cu and src/util.cu, from NCCL 1 (``bytes N type op time algbw busbw res``, milliseconds)
over ``error`` columns to today's ``#wrong``, per-iteration columns and timestamps. In front of a line may stand what
``srun -l``, ``mpirun --tag-output``, ``kubectl logs --prefix`` and the like add.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# "0: ", " 0: ", "[1,0]<stdout>: ", "[1,0]<stdout>:", "[pod/x/y] ", "12: host: " (srun -l over a launcher that tags)
_PREFIX = re.compile(r"^\s*(?:\[\d+,(?P<mpi>\d+)\](?:<\w+>)?:?|(?P<srun>\d+):(?=\s|$)|\[pod/\S+\]|>)")
_TYPES = [
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "half",
    "float",
    "double",
    "bfloat16",
    "fp8_e4m3",
    "fp8_e5m2",
    "f8e4m3",
    "f8e5m2",
    "float8_e4m3",
    "float8_e5m2",
    "char",
    "int",
    "uint",
    "float16",
]
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf|-nan)"
_CELL = re.compile(rf"(?:{_NUMBER}\*?|N/A)\Z")
_ROW = re.compile(rf"(?<![\w.,/:=-])(\d+)\s+(\d+)\s+({'|'.join(_TYPES)})\s+([a-z]\w*)(?=\s|$)(.*)")
_HEADER = re.compile(r"^\s*#?\s*((?:size|bytes)\s+.*\bbusbw\b.*)$")
_DEVICE = re.compile(
    r"#?\s*Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\]\s*(.*)|#?\s*Device\s+(\d+)\s+->\s+(\d+)\s+\[[^\]]*\]\s*(.*)"
)
_BANNER = re.compile(
    r"#?\s*nThreads?:?\s+\d+\s+nGpus:?\s+\d+.*?minBytes:?\s+(\d+)\s+maxBytes:?\s+(\d+)\s+step:?\s+(\d+)\((\w+)\)"
)
_REDUCED = re.compile(r"Reducing maxBytes to (\d+)")
_PROGRAM = re.compile(
    r"\b(all_?reduce|all_?gather|reduce_?scatter|all_?to_?allv?|broadcast|sendrecv|reduce|gather|scatter|hypercube)_perf\b"
)
_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
_OUT_OF_BOUNDS = re.compile(r"#?\s*Out of bounds values\s*:\s*(\d+)\s*(OK|FAILED)?")
_AVERAGE = re.compile(rf"#?\s*Avg bus bandwidth\s*:\s*({_NUMBER})\s*(OK|FAILED)?")
_CONCLUDED = re.compile(r"#?\s*Collective test concluded")
_STARTING = re.compile(r"#?\s*(?:Collective test starting|nccl-tests version|Using devices)")
_VERSION = re.compile(r"\bNCCL version ([\d.]+)|nccl-library=(\d+)")
_COMM = re.compile(r"^(\S+?):\d+:\d+ \[\d+\] NCCL INFO .*\brank (\d+) nranks (\d+) cudaDev (\d+)")
# What ends a run. A warning of NCCL alone does not.
_FATAL = re.compile(
    r"Test (?:NCCL|CUDA) failure|Test failure |NCCL failure |unhandled (?:cuda|system) error"
    r"|nccl(?:Internal|System|Unhandled)\w*Error"
    r"|Segmentation fault|[Cc]ore dumped|Bus error|Caught signal|\*\*\* Process received signal|MPI_A(?:BORT|bort)"
    r"|exited on signal|Primary job\s+terminated|ORTE has lost"
    r"|srun: error:|slurmstepd: error:|CANCELLED AT|DUE TO TIME LIMIT"
    r"|out of memory|OOM[ -][Kk]ill|^Killed$|^Aborted|Invalid number of GPUs|Watchdog caught|invalid usage"
)


@dataclass(frozen=True)
class Columns:
    """What stands where in a row: indices into its cells.

    Attributes:
        names: the leading columns, before the first time.
        groups: for out-of-place and in-place: index of time, algbw, busbw and of the check (-1: there is none).
        check: name of the check's column: "#wrong" (a count), "error" or "res" (a difference), "" without one.
        milliseconds: NCCL 1 wrote times in ms.
        width: cells of a whole row.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[int, int, int, int], ...]
    check: str
    milliseconds: bool
    width: int


def _columns(tokens: Sequence[str]) -> Columns | None:
    starts = [i for i, token in enumerate(tokens) if token in ("time", "cputime")]
    if not starts:
        return None
    groups = []
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        part = list(tokens[start:end])
        if "algbw" not in part or "busbw" not in part:
            return None
        check = next((start + i for i, token in enumerate(part) if token in ("#wrong", "error", "res")), -1)
        groups.append((start, start + part.index("algbw"), start + part.index("busbw"), check))
    width = len(tokens) - ("timestamp" in tokens)
    at = groups[0][3]
    return Columns(
        tuple(tokens[: starts[0]]), tuple(groups[:2]), tokens[at] if at >= 0 else "", "bytes" in tokens, width
    )


TODAY = _columns(
    ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "time", "algbw", "busbw", "#wrong"]
)


def clean(line: str) -> tuple[str | None, str]:
    """The label that a launcher put in front ("0" of ``0: ...``), or None, and the line without it."""
    text = _ANSI.sub("", line).rstrip()
    match = _PREFIX.match(text)
    if not match:
        return None, text
    return match["mpi"] or match["srun"], text[match.end() :]


def header(text: str) -> Columns | None:
    """The columns, when this is the line that names them."""
    match = _HEADER.match(text)
    return _columns(match[1].replace("# wrong", "#wrong").split()) if match else None


def cells(text: str, columns: Columns) -> list[str] | None:
    """The cells of a row, fewer than ``columns.width`` when it was cut; None when this is no row."""
    if "type" in columns.names:
        match = _ROW.search(text)
        if not match:
            return _cut(text, columns)
        found, rest = [match[1], match[2], match[3], match[4]], match[5].split()
    else:
        rest = text.split()
        found = []
        if not rest or not rest[0].isdigit():
            return None
    for token in rest:
        if not _CELL.match(token):
            glued = re.match(
                r"[-+]?\d+(?=[A-Za-z])", token
            )  # "-1host:12:34 [0] NCCL INFO": another writer came between
            if glued:
                found.append(glued[0])
            break
        found.append(token)
    return found[: columns.width] if len(found) > 1 or "type" in columns.names else None


def _cut(text: str, columns: Columns) -> list[str] | None:
    """A row that ends before its operation: ``131072``, or ``131072  32768  float``."""
    tokens = text.split()
    if not 1 <= len(tokens) <= 3 or not all(token.isdigit() for token in tokens[:2]):
        return None
    return tokens if len(tokens) < 3 or tokens[2] in _TYPES else None


def continuation(text: str) -> list[str]:
    """The cells of a line that holds nothing else; empty for any other line."""
    tokens = text.split()
    return tokens if tokens and all(_CELL.match(token) for token in tokens) else []


def number(cell: str) -> float | None:
    """None for N/A."""
    return None if cell == "N/A" else float(cell.rstrip("*"))


def device(text: str) -> tuple[int, str, int, str] | None:
    """Rank, host ("" in NCCL 1), device and GPU name ("" in RCCL) of a line of "Using devices"."""
    match = _DEVICE.match(text.strip())
    if not match:
        return None
    if match[1] is not None:
        return int(match[1]), match[2], int(match[3]), match[4].strip()
    return int(match[5]), "", int(match[6]), match[7].strip()


def banner(text: str) -> tuple[int, int, bool] | None:
    """Largest size asked for in bytes, the step, and whether the step is a factor."""
    match = _BANNER.match(text.strip())
    return (int(match[2]), int(match[3]), match[4] == "factor") if match else None


def reduced(text: str) -> int | None:
    """The largest size in bytes after the test lowered it for want of memory."""
    match = _REDUCED.search(text)
    return int(match[1]) if match else None


def program(text: str) -> str | None:
    """The collective of a program that is named in this line: all_reduce for all_reduce_perf."""
    match = _PROGRAM.search(text)
    return _NAMES.get(match[1], match[1]) if match else None


def out_of_bounds(text: str) -> tuple[int, bool] | None:
    """Wrong elements, and whether the footer calls that failed."""
    match = _OUT_OF_BOUNDS.match(text.strip())
    return (int(match[1]), match[2] == "FAILED" or int(match[1]) > 0) if match else None


def average(text: str) -> float | None:
    match = _AVERAGE.match(text.strip())
    return float(match[1]) if match else None


def concluded(text: str) -> bool:
    return bool(_CONCLUDED.match(text.strip()))


def starting(text: str) -> bool:
    return bool(_STARTING.match(text.strip()))


def version(text: str) -> str | None:
    """NCCL's version; 22903 of the newer banner is 2.29.3."""
    match = _VERSION.search(text)
    if not match:
        return None
    if match[1]:
        return match[1].rstrip(".")
    code = int(match[2])
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def communicator(text: str) -> tuple[str, int, int, int] | None:
    """Host, rank, ranks and device of a line of NCCL's own log that tells all four."""
    match = _COMM.match(text.strip())
    return (match[1], int(match[2]), int(match[3]), int(match[4])) if match else None


def fatal(text: str) -> str | None:
    """The line when it tells the end of a run."""
    text = text.strip()
    return text[:200] if _FATAL.search(text) else None
