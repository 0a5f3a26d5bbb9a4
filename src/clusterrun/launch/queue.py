"""What Slurm says of jobs: squeue for those it still knows, sacct for those it has forgotten. One call each for all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clusterrun import process
from clusterrun.errors import CommandError

SLURM_TIMEOUT_S = 60.0
_COLUMNS = ("job_id", "name", "state", "nodes", "start", "time_left", "reason")
_FORMAT = "%i|%j|%T|%N|%S|%L|%r"
_SACCT_FIELDS = ("job_id", "name", "state", "exit_code", "nodes", "reason")
_SACCT_FORMAT = "JobID,JobName,State,ExitCode,NodeList,Reason"

PENDING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ALIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
_COMPACT = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "CF": "CONFIGURING",
    "CG": "COMPLETING",
    "DL": "DEADLINE",
    "F": "FAILED",
    "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "PD": "PENDING",
    "PR": "PREEMPTED",
    "R": "RUNNING",
    "RD": "RESV_DEL_HOLD",
    "RF": "REQUEUE_FED",
    "RH": "REQUEUE_HOLD",
    "RQ": "REQUEUED",
    "RS": "RESIZING",
    "RV": "REVOKED",
    "S": "SUSPENDED",
    "SE": "SPECIAL_EXIT",
    "SI": "SIGNALING",
    "SO": "STAGE_OUT",
    "ST": "STOPPED",
    "TO": "TIMEOUT",
}
# Header words of squeue and sacct, as their default formats and %-letters print them.
_HEADERS = {
    "jobid": "job_id",
    "name": "name",
    "jobname": "name",
    "state": "state",
    "st": "state",
    "nodelist": "nodes",
    "nodelist(reason)": "nodes_or_reason",
    "reason": "reason",
    "start_time": "start",
    "time_left": "time_left",
    "partition": "partition",
    "user": "user",
    "account": "account",
    "qos": "qos",
    "cpus": "cpus",
    "nodes": "node_count",
    "time": "time",
    "exitcode": "exit_code",
}


@dataclass(frozen=True)
class Entry:
    """One job, or one task of an array, in Slurm's words. ``""`` where it was not said."""

    job_id: str
    name: str = ""
    state: str = ""  # long form: PENDING, RUNNING, ...
    reason: str = ""
    nodes: str = ""  # host list
    start: str = ""  # expected or real, as Slurm prints it
    time_left: str = ""
    exit_code: str = ""  # code:signal
    partition: str = ""
    user: str = ""

    @property
    def is_pending(self) -> bool:
        return self.state in PENDING

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def entries(text: str, columns: Sequence[str] = ()) -> list[Entry]:
    """Read what squeue or sacct printed: cells between ``|``, or in columns of blanks.

    ``columns`` names the cells; without them the first line is a header. A reason may hold anything (blanks, commas,
    even ``|``), as site plugins write their own. With blanks between cells only the last may hold blanks.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    names = list(columns)
    if not names and lines:
        names = [_HEADERS.get(word.strip().lower(), "") for word in _split(lines.pop(0), 0)]
    found = []
    for line in lines:
        cells = dict(zip(names, _join_surplus(_split(line, len(names)), names), strict=False))
        shared = cells.pop("nodes_or_reason", "")
        if shared.startswith("("):
            cells["reason"] = shared.strip("()")
        elif shared:
            cells["nodes"] = shared
        plain = {key: "" if value in ("N/A", "(null)", "n/a") else value for key, value in cells.items()}
        plain["state"] = _state(plain.get("state", ""))
        if plain.get("reason") == "None":
            plain["reason"] = ""
        known = {key: value for key, value in plain.items() if key in Entry.__dataclass_fields__}
        found.append(Entry(**{"job_id": "", **known}))
    return found


def _split(line: str, count: int) -> list[str]:
    if "|" in line:
        return [cell.strip() for cell in line.split("|")]
    return line.split(maxsplit=max(0, count - 1)) if count else line.split()


def _join_surplus(cells: list[str], names: Sequence[str]) -> list[str]:
    """More cells than columns: the reason held a ``|``."""
    surplus = len(cells) - len(names)
    if surplus <= 0 or "reason" not in names:
        return cells
    at = names.index("reason")
    return [*cells[:at], "|".join(cells[at : at + surplus + 1]), *cells[at + surplus + 1 :]]


def _state(word: str) -> str:
    """``CANCELLED by 1000``, ``PD`` and ``RUNNING+`` in their long, plain form."""
    first = word.split()[0].rstrip("+*") if word.split() else ""
    return _COMPACT.get(first, first)


def in_queue() -> dict[str, Entry]:
    """This user's jobs that Slurm still knows, by id (12_3 for a task of an array): also those that ended lately.

    Raises:
        CommandError: squeue is not there, or slurmctld does not answer.
    """
    argv = ["squeue", "--noheader", "--array", "--states=all", f"--format={_FORMAT}", f"--user={os.getuid()}"]
    shown = process.run(argv, timeout_s=SLURM_TIMEOUT_S)
    return {entry.job_id: entry for entry in entries(shown, _COLUMNS)}


def accounted(job_ids: Iterable[str]) -> dict[str, list[Entry]]:
    """What the accounting has of jobs, oldest first for each id. Empty where a site keeps none, or has no sacct."""
    wanted = list(dict.fromkeys(job_ids))
    if not wanted:
        return {}
    argv = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates"]
    argv += [f"--format={_SACCT_FORMAT}", f"--jobs={','.join(wanted)}"]
    try:
        shown = process.run(argv, timeout_s=SLURM_TIMEOUT_S)
    except CommandError:
        return {}
    found: dict[str, list[Entry]] = {}
    for entry in entries(shown, _SACCT_FIELDS):
        found.setdefault(re.sub(r"\+\d+$", "", entry.job_id), []).append(entry)
    return found
