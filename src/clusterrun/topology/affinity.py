"""The cells behind the matrix: CPU list, NUMA nodes, the GPU's own NUMA node. Any of them may be empty."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterrun.topology.grammar import RELATION, Cells, ascending, expand
from clusterrun.topology.lines import Header, Row

_TAB_STOP = 8  # columns, as terminals expand the tabs that nvidia-smi prints


@dataclass(frozen=True)
class Affinity:
    """What one row says, None and () where the cell is empty, "N/A", or can't be told apart.

    Attributes:
        cells: how many cells hold text; tells a row that was cut from one that is whole.
    """

    cpu: str | None
    numa: tuple[int, ...]
    gpu_numa: int | None
    cells: int


def read_affinity(row: Row, header: Header | None, cells: Cells) -> Affinity:
    """Read the cells behind the relations of one GPU row."""
    tail = cells.tail.rstrip(" \"'\\,;)]}")
    titles = header.titles if header else _titles_without_header(tail)
    words = tail.split()
    if not titles or not words:
        return Affinity(None, (), None, len(words))
    if "\t" in tail and not cells.glued and all(len(part.split()) <= 1 for part in tail.split("\t")):
        values = _by_tabs(tail, len(titles))
    else:
        values = _by_blanks(row, header, cells, tail, titles)
    found = dict(zip(titles, values, strict=False))
    cpu, numa, own = found.get("cpu"), found.get("numa"), found.get("gpu_numa")
    return Affinity(
        cpu if cpu and ascending(cpu) else None,
        expand(numa) if numa else (),
        int(own) if own and own.isdigit() else None,
        len(words),
    )


def _titles_without_header(tail: str) -> tuple[str, ...]:
    """With the header lost, the number of cells tells which generation of drivers printed them."""
    return ("cpu", "numa", "gpu_numa")[: min(3, len(tail.split()))]


def _by_tabs(tail: str, columns: int) -> list[str]:
    """Exact cells. Drivers print one empty cell more than the header has, before the last one."""
    values = [part.strip() for part in tail.split("\t")[1:]]
    while len(values) > columns and "" in values:
        spare = len(values) - 2 if values[-2] == "" else len(values) - 1 - values[::-1].index("")
        del values[spare]
    return values


def _by_blanks(row: Row, header: Header | None, cells: Cells, tail: str, titles: tuple[str, ...]) -> list[str]:
    words = _words(tail)
    if cells.glued and len(words) != len(titles):
        return []
    texts = [word for _, word in words]
    if len(texts) >= len(titles):
        return texts if all(ascending(text) or text == "N/A" for text in texts[: len(titles)]) else []
    # Some cells are empty. The last title's "N/A" is printed whenever there are three titles.
    values = {}
    if texts[-1] == "N/A":
        values[titles[-1]] = words.pop()[1]
    if words and len(words) < len(titles) - len(values):
        base = len(row.label) + cells.offset
        for at, word in words:
            place = _place(base, at, row, header) if not row.joined else None
            if place is None and ("," in word or "-" in word) and "numa" in titles and "cpu" not in values:
                place = "cpu" if len(words) == 1 and not _could_be_numa(word) else None
            if place in titles:
                values[str(place)] = word
    else:
        values.update(zip(titles, (word for _, word in words), strict=False))
    return [values.get(title, "") for title in titles]


def _could_be_numa(word: str) -> bool:
    """NUMA lists are short and low; a CPU list that could also be one is left unknown."""
    return len(expand(word)) <= 8 and max(expand(word), default=0) < 16


def _place(base: int, at: int, row: Row, header: Header | None) -> str | None:
    """Which column a word stands in, when some cells are empty: by tab stops, or by alignment with the titles.

    Either counts only when the relation cells of the row bear it out, else a chance position would be taken for a fact.
    """
    cells = [(m.start(), m[0]) for m in re.finditer(RELATION, row.text[: base + 1]) if m.start() >= len(row.label)]
    start = base + at
    found = set()
    if all(begin % _TAB_STOP == (token == "X") for begin, token in cells):
        stop = (base // _TAB_STOP + 1) * _TAB_STOP  # the CPU cell's place when tabs were expanded
        if start in (stop, stop + _TAB_STOP):
            found.add("cpu" if start == stop else "numa")
    if header and header.title_at and _same_ruler(header, row):
        shift = len(row.prefix) - len(header.prefix)
        names = [m.start() for m in re.finditer(r"\S+", header.text)][: len(cells)]
        if all(abs(begin + shift - name) <= 1 for (begin, _), name in zip(cells, names, strict=False)):
            near = (
                title
                for title, where in zip(header.titles, header.title_at, strict=False)
                if abs(start + shift - where) <= 1
            )
            found.update(near)
    return found.pop() if len(found) == 1 else None


def _same_ruler(header: Header, row: Row) -> bool:
    """Columns of two lines can be compared: neither has tabs, but for those in a prefix that both have."""
    shared = header.prefix[: header.prefix.rfind("\t") + 1]
    return row.prefix.startswith(shared) and "\t" not in row.prefix[len(shared) :] + header.text + row.text


def _words(tail: str) -> list[tuple[int, str]]:
    words: list[tuple[int, str]] = []
    at = 0
    for word in tail.split():
        at = tail.index(word, at)
        if words and words[-1][1].endswith(",") and word[0].isdigit():
            words[-1] = (words[-1][0], words[-1][1] + word)  # "0-7, 16-23"
        else:
            words.append((at, word))
        at += len(word)
    return words
