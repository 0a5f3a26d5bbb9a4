"""What one line of a paste is: a header of the matrix, a row of it, or something else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from clusterrun.topology.grammar import GPU_NAME, NUMBERED_NAME, RELATION, UNKNOWN, Cells, read_cells, split_names

#: Titles of the columns behind the matrix, in the order in which drivers print them.
TITLES = (("cpu", "CPU Affinity"), ("numa", "NUMA Affinity"), ("gpu_numa", "GPU NUMA ID"))

_TITLE = re.compile(r"CPU\s*Affinity|NUMA\s*Affinity|GPU\s*NUMA\s*ID")
_CUT_TITLE = re.compile(
    r"(?:(?<=\s)(?:C|CP)|CPU(?:\s*A[a-z]*)?|(?<=\s)(?:N|NU|NUM)|NUMA(?:\s*A[a-z]*)?"
    r"|(?<=\s)(?:G|GP)|GPU(?:\s+N[UMA]*(?:\s+I?)?)?)$"
)
_ROW = re.compile(rf"(?<![\w.])(?<!\w-)([A-Za-z][\w.\-]*?)(?=(?:{UNKNOWN})*[ \t]+{RELATION}(?:[ \t]|$|\d|{RELATION}))")
_GLUED_ROW = re.compile(rf"(?<![\w.])(?<!\w-)({NUMBERED_NAME})(?={RELATION})")
_PUNCTUATION = "\"'`,;\\])}>:"


@dataclass(frozen=True)
class Header:
    """The line with the column names.

    Attributes:
        names: devices in column order.
        titles: keys of TITLES that follow them.
        title_at: where each title starts, counted from the first name.
        prefix: text before the first name.
        cut: the line ends inside a name or a title.
        text: the line from the first name on (for joining wrapped lines).
        pure: there is nothing but names and titles in the text.
        titled: it has a whole title, so it can't be prose or a row that was cut ("GPU1  N").
    """

    names: tuple[str, ...]
    titles: tuple[str, ...]
    title_at: tuple[int, ...]
    prefix: str
    cut: bool
    text: str
    pure: bool = True
    titled: bool = False

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if GPU_NAME.fullmatch(name))


@dataclass
class Row:
    """One row, while a paste is being read.

    Attributes:
        label: device of the row.
        prefix: text before the label.
        text: the row from its label on; grows when wrapped lines are joined.
        line: number of its last physical line, from 0.
        joined: it was put together from several lines, so columns no longer say anything.
    """

    label: str
    prefix: str
    text: str
    line: int
    joined: bool = False
    _read: dict[tuple[str, int | None], Cells] = field(default_factory=dict, repr=False)

    def cells(self, columns: int | None) -> Cells:
        """Relation cells of the text as it is now (kept, as they are asked for several times)."""
        key = (self.text, columns)
        if key not in self._read:
            self._read[key] = read_cells(self.text[len(self.label) :], columns)
        return self._read[key]


def row_labels(lines: Sequence[str]) -> frozenset[str]:
    """Words that stand before relation cells: the labels that headers are checked against.

    A word without a digit ("is SYS") counts only before two cells or more: prose mentions one at a time.
    """
    found = set()
    for number, line in enumerate(lines):
        for row in find_rows(line, number):
            if any(char.isdigit() for char in row.label) or len(row.cells(None).links) > 1:
                found.add(row.label)
    return frozenset(found)


def find_rows(line: str, number: int) -> list[Row]:
    """What could be a row in this line, leftmost first: a word, then at least one relation cell."""
    found = [*_ROW.finditer(line), *_GLUED_ROW.finditer(line)]
    matches = [match for match in found if not re.fullmatch(RELATION, match[1])]
    return [Row(match[1], line[: match.start()], line[match.start() :], number) for match in matches]


def find_header(line: str, labels: frozenset[str]) -> Header | None:
    """The header in a line, or None. The text before the first name may be anything."""
    if "GPU" not in line:
        return None
    for start in re.finditer(r"(?<![\w./=])(?<!\w-)GPU\d", line):
        header = _header_at(line, start.start(), labels)
        if header is not None:
            return header
    return None


def _header_at(line: str, start: int, labels: frozenset[str]) -> Header | None:
    text = line[start:].rstrip().rstrip(_PUNCTUATION).rstrip()
    first = _TITLE.search(text)
    head, behind = (text[: first.start()], text[first.start() :]) if first else (text, "")
    cut = False
    if not first:
        fragment = _CUT_TITLE.search(head)
        if fragment and fragment[0] not in labels:
            cut, head, behind = True, head[: fragment.start()], head[fragment.start() :]
    names: list[str] = []
    words = head.split()
    for position, word in enumerate(words):
        part = split_names(word, labels)
        if part is None or not set(part).isdisjoint(names):
            # A name cut in the middle ("mlx", or GPU1 for GPU12) can only be the last thing on the line.
            if first or position != len(words) - 1 or position < 2 or not re.fullmatch(r"\w{1,8}", word):
                return None
            cut = True
            break
        names.extend(part)
    if not names or len(set(names)) != len(names):
        return None
    titles, at, cut_title = _titles(behind, len(text) - len(behind))
    pure = len(set(titles)) == len(titles) and (cut_title or not _TITLE.sub("", behind).strip())
    return Header(tuple(names), titles, at, line[:start], cut or cut_title, text, pure, first is not None)


def _titles(behind: str, offset: int) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    keys: list[str] = []
    at: list[int] = []
    end = 0
    for match in _TITLE.finditer(behind):
        words = re.sub(r"\s", "", match[0])
        keys.append(next(key for key, title in TITLES if title.replace(" ", "") == words))
        at.append(offset + match.start())
        end = match.end()
    rest = behind[end:].strip()
    wanted = re.sub(r"\s", "", rest)
    whole = [key for key, title in TITLES if wanted and title.replace(" ", "").startswith(wanted)]
    if len(whole) == 1 and whole[0] not in keys:  # a title cut short still stands for its column
        keys.append(whole[0])
        at.append(offset + behind.rfind(rest))
    cut = len(whole) == 1
    return tuple(keys), tuple(at), cut
