"""The token grammar of ``nvidia-smi topo -m``: relation cells, titles, CPU and NUMA lists.

Cells may be separated by tabs, by blanks, or (when a paste lost both) by nothing. Glued cells are split only where the
grammar leaves one reading; where it leaves several, the cell is unknown. Nothing is guessed from what is likely.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterrun.topology.model import Link

RELATION = r"(?:NV\d{1,2}|NODE|PIX|PXB|PHB|SYS|SOC|X)"
GPU_NAME = re.compile(r"GPU\d+")
#: Names that can be told apart even when glued, because each ends in a number and the next begins with a letter.
NUMBERED_NAME = r"(?:GPU\d+|NIC\d+|mlx\d_(?:bond_|ib|an)?\d+)"
_PLAIN_NAME = re.compile(r"[A-Za-z][\w.\-]*\d[\w.\-]*")
_TOKEN = re.compile(rf"[ \t]*({RELATION})")
_AFTER_TOKEN = re.compile(rf"[ \t]|$|{RELATION}|\d|N/A|[\"'\\,\]}}]")
#: A cell that says that the driver does not know.
UNKNOWN = r"[ \t]+(?:N/A|\?+|-+|ERR!|Unknown|Unk)"
_UNKNOWN_CELL = re.compile(rf"{UNKNOWN}(?=(?:{UNKNOWN})*[ \t]+{RELATION}\b)")
P2P_WORDS = frozenset({"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"})

_LIST = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")


def ascending(text: str) -> bool:
    """True for a CPU or NUMA list whose ranges and order go up, as the kernel prints them ("0-31,64-95")."""
    if not _LIST.fullmatch(text):
        return False
    last = -1
    for part in text.split(","):
        low, _, high = part.partition("-")
        if int(low) <= last or (high and int(high) < int(low)):
            return False
        last = int(high or low)
    return True


def expand(text: str) -> tuple[int, ...]:
    """The numbers of a list: "0-3" is 0, 1, 2, 3. Empty when it is not a list."""
    if not ascending(text):
        return ()
    numbers: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        numbers.extend(range(int(low), int(high or low) + 1))
    return tuple(numbers)


def split_names(word: str, known: frozenset[str]) -> list[str] | None:
    """The device names in one word of a header, or None when it is not made of names."""
    if word in known:
        return [word]
    if re.fullmatch(f"{NUMBERED_NAME}+", word):
        return re.findall(NUMBERED_NAME, word)
    if _PLAIN_NAME.fullmatch(word) and not re.fullmatch(RELATION, word):
        return [word]
    return None


def list_words(tail: str) -> list[str]:
    """Words behind the relation cells, without the quotes and brackets of a log or a script around the line."""
    return tail.rstrip(" \t\"'\\,;)]}").split()


def like_affinity(tail: str) -> bool:
    """True when nothing but lists and "N/A" follows the relation cells: prose does not end that way."""
    return all(ascending(word) or word == "N/A" for word in list_words(tail))


@dataclass(frozen=True)
class Cells:
    """Relation cells of one row.

    Attributes:
        links: what was read, None where a cell is empty or has more than one reading.
        tail: the text after the last relation cell: the affinity cells.
        offset: where the tail starts, in characters from the start of what was parsed.
        glued: True when the tail starts without a separator.
        peer_words: the row goes on with words of ``topo -p2p``.
    """

    links: tuple[Link | None, ...]
    tail: str
    offset: int
    glued: bool
    peer_words: bool


def read_cells(rest: str, columns: int | None) -> Cells:
    """Read relation cells from the text after a row's label.

    Args:
        rest: the row without its label.
        columns: how many cells the header promises; None when there is no header (read as many as there are).
    """
    exact = _by_tabs(rest, columns) if columns is not None else None
    if exact is not None:
        return exact
    links: list[Link | None] = []
    at = 0
    while columns is None or len(links) < columns:
        unknown = _UNKNOWN_CELL.match(rest, at)
        if unknown:
            links.append(None)
            at = unknown.end()
            continue
        match = _TOKEN.match(rest, at)
        if match is None or not (match[1].startswith("NV") or _AFTER_TOKEN.match(rest, match.end())):
            break
        link, end = _nvlink_end(rest, match) if match[1].startswith("NV") else (Link.parse(match[1]), match.end())
        links.append(link)
        at = end
        if rest[at : at + 1].isdigit():
            break  # a list is glued on: no relation can follow
    tail = rest[at:]
    first = tail.split(maxsplit=1)[0] if tail.strip() else ""
    glued = bool(tail) and not tail[0].isspace() and tail[0] not in "\"'\\,]}"
    return Cells(tuple(links), tail, at, glued, first in P2P_WORDS)


def _nvlink_end(rest: str, match: re.Match[str]) -> tuple[Link | None, int]:
    """An NV# cell, when digits of a CPU list may be glued to it ("NV120-23" is NV12 0-23, or NV1 20-23)."""
    word = re.match(r"NV([\d,\-]+)", rest[match.start(1) :])
    assert word is not None
    digits = word[1]
    end = match.start(1) + 2
    all_glued = not rest[:1].isspace()  # then the second digit may as well be a NUMA node behind an empty CPU cell
    if digits.isdigit() and len(digits) <= 2:
        unclear = all_glued and len(digits) == 2 and not re.match(RELATION, rest[match.end() :])
        return (None if unclear else Link.parse(match[1])), match.end()
    readings = [cut for cut in (1, 2) if digits[:cut].isdigit() and digits[0] != "0" and ascending(digits[cut:])]
    if len(readings) == 1:
        return Link.parse(f"NV{digits[: readings[0]]}"), end + readings[0]
    return None, end + len(digits)


def _by_tabs(rest: str, columns: int) -> Cells | None:
    """Exact columns, when the row is tab separated and one of its cells is empty or says that it is unknown."""
    parts = rest.split("\t")
    if len(parts) <= columns or parts[0].strip():
        return None
    links: list[Link | None] = []
    empty = 0
    for cell in parts[1 : columns + 1]:
        word = cell.strip()
        link = Link.parse(word)
        if link is None and word and word not in ("N/A", "?", "-", "ERR!", "Unknown"):
            return None
        empty += link is None
        links.append(link)
    cut = len(parts) == columns + 1 and not parts[columns].strip()  # nothing shows that the last cell was printed
    if not empty or empty == columns or cut:
        return None
    offset = sum(len(part) + 1 for part in parts[: columns + 1]) - 1
    return Cells(tuple(links), rest[offset:], offset, False, False)
