"""Who said a line: the label that srun -l, pdsh, mpirun, kubectl and log collectors put in front of it."""

from __future__ import annotations

import re

_NOISE = re.compile(
    r"\d{4}[-/]\d\d[-/]\d\d[T ]?"  # dates
    r"|\d{1,2}:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"  # times
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2}\b"
    r"|\b\d{9,}(?:\.\d+)?\b"  # epoch seconds
    r"|\b(?:DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR)\b"
    r"|\b(?:stdout|stderr) [FP]\b"  # CRI log format
    r"|\{\"log\":"  # docker's json-file
)
_PROMPT = re.compile(r"(?:[\w.\-]+@)([\w.\-]+)[:\s~][^$#>%]*[$#>%]")
_DECORATION = " \t#*=-_~>:`+|\"'"
_NOT_HEADINGS = re.compile(r"nvidia-smi|Legend|^\s*NIC\d+:|= Connection|^\s*[\x60~]{3}|\btopo\b", re.I)


def stream_key(prefix: str) -> str:
    """What is left of a line's prefix when time stamps, levels and quoting are gone: equal for lines of one sender."""
    return _NOISE.sub("", prefix).strip(" \t#*`>\"'+$-:").rstrip(":|>] ").lstrip("[({< ")


def sender(prefix: str) -> str | None:
    """The host or task that a label names ("node17: ", "[1,0]<stdout>: ", "node1 | "); None for other prefixes."""
    label = _NOISE.sub("", prefix).strip()
    name = label.rstrip(":| \t")
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    plain = re.search(r"[A-Za-z]", name) and not re.search(r"[\s\"'{}]", name)
    return name if plain and label.endswith((":", "|", "]", ">")) else None


def heading(lines: list[str], at: int) -> str | None:
    """The machine's name from the lines just above a header: a prompt's host, or a short heading; None when unsure."""
    for line in reversed(lines[max(0, at - 6) : at]):
        prompt = _PROMPT.search(line)
        if prompt:
            return prompt[1]
        words = line.strip(_DECORATION)
        if words.startswith("[") and words.endswith("]"):
            words = words[1:-1]
        if not words or _NOT_HEADINGS.search(line):
            continue
        short = len(words) <= 60 and len(words.split()) <= 4
        return words if short and "\t" not in words else None
    return None
