"""Reader of ``nvidia-smi topo -m`` text, in the forms in which people paste it.

The text is cleaned (``normalize``), grouped into matrices (``blocks``), and each matrix is checked and turned into a
Topology here. What a cut paste does not show is unknown, listed in ``missing``, and never filled in from what is
likely; only the mirror cell (GPU1-GPU0 for GPU0-GPU1) may stand in, as the matrix is symmetric.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterrun.topology.affinity import Affinity, read_affinity
from clusterrun.topology.blocks import Block, group
from clusterrun.topology.grammar import GPU_NAME, RELATION, list_words
from clusterrun.topology.lines import Row
from clusterrun.topology.model import SELF, Gpu, Link, Nic, Topology, TopologyError
from clusterrun.topology.normalize import clean_lines, decode
from clusterrun.topology.reject import explain
from clusterrun.topology.streams import heading, sender

Cell = Link | None


def parse_topologies(text: str | bytes) -> list[Topology]:
    """Every machine in a paste, in order of appearance.

    Raises:
        TopologyError: there is no link matrix in it; the message says what it is instead, as far as that is clear.
    """
    lines = clean_lines(decode(text) if isinstance(text, bytes) else text)
    blocks = group(lines)
    matrices = [block for block in blocks if _is_matrix(block, blocks)]
    if not matrices:
        raise TopologyError(explain(lines, any(block.peer for block in blocks)))
    last_line = max((number for number, line in enumerate(lines) if line.strip()), default=0)
    return [_Assembler(block, _name(block, lines, len(matrices)), last_line).build() for block in matrices]


def _is_matrix(block: Block, blocks: Sequence[Block]) -> bool:
    if block.peer or (block.maybe_peer and not (block.header and block.header.titles)):
        return False
    if block.header is None:
        return len(block.rows) > 1 or any(list_words(row.cells(None).tail) for row in block.rows.values())
    if block.rows:
        return True
    # A header without rows is a cut paste, unless it is a copy: rows of the same columns come after it.
    names = block.header.names
    twins = [other for other in blocks if other.header and other.header.names == names]
    copied = any(row.line > block.line for twin in twins for row in twin.rows.values())
    return block.header.titled and not copied


def _name(block: Block, lines: Sequence[str], machines: int) -> str | None:
    senders = {sender(row.prefix.replace("\t", "|")) for row in block.rows.values()}
    if len(senders) == 1 and None not in senders:
        return senders.pop()
    return heading(list(lines), block.line) if machines > 1 else None


class _Assembler:
    """One block to one Topology."""

    def __init__(self, block: Block, name: str | None, last_line: int) -> None:
        self.block = block
        self.name = name
        self.last_line = last_line
        self.missing: list[str] = []
        self.notes: list[str] = []
        self.columns = self._columns()
        self.cells = self._read()

    def build(self) -> Topology:
        gpus = [at for at, name in enumerate(self.columns) if GPU_NAME.fullmatch(name)]
        # A column named CPU is of hand-made tables; it is no NIC.
        others = [at for at, name in enumerate(self.columns) if at not in gpus and not re.fullmatch(r"CPU\d*", name)]
        if not gpus:
            raise TopologyError("not a topology: a matrix without a GPU")
        affinities = self._affinities([self.columns[at] for at in gpus])
        self._report_missing()
        self._report_asymmetry(gpus)
        if self.block.hidden_nics:
            self.missing.append(f"{self.block.hidden_nics} NICs that nvidia-smi did not display")
        return Topology(
            gpus=tuple(
                Gpu(name, int(name[3:]), cpu_affinity=a.cpu, numa=a.numa, gpu_numa_id=a.gpu_numa)
                for name, a in ((self.columns[at], affinities[self.columns[at]]) for at in gpus)
            ),
            links=tuple(tuple(self._pair(i, j) for j in gpus) for i in gpus),
            nics=tuple(self._nic(at, gpus, others) for at in others),
            name=self.name,
            missing=tuple(self.missing),
            notes=tuple(self.notes),
        )

    def _columns(self) -> list[str]:
        """Names of the columns: the header's, and those that only rows show because the header was cut or lost."""
        header, rows = self.block.header, self.block.rows
        names = list(header.names) if header else []
        extra = [label for label in rows if label not in names]
        if header is None:
            self.missing.append("the header line")
        elif extra or (self.block.open_ended and self._widest() > len(names)):
            self.missing.append(f"the end of the header line (it stops after {names[-1]})")
        if extra and names:  # GPUs come before NICs
            gpus = [name for name in [*names, *extra] if GPU_NAME.fullmatch(name)]
            return [*gpus, *(name for name in [*names, *extra] if not GPU_NAME.fullmatch(name))]
        return names + extra

    def _widest(self) -> int:
        return max((len(row.cells(self.block.width).links) for row in self.block.rows.values()), default=0)

    def _read(self) -> dict[tuple[int, int], Cell]:
        """Cells by (row, column); a cell that is not there was not read."""
        cells: dict[tuple[int, int], Cell] = {}
        for label, row in self.block.rows.items():
            place = self.columns.index(label)
            links = list(row.cells(self.block.width).links)
            if links and self._cut_in_cell(row, len(links)):
                # A cut can turn NV12 into NV1, so a count of one digit at the end of a cut row proves nothing.
                last = links[-1]
                links[-1] = None if last is not None and 0 < last.nvlinks < 10 else last
            selves = [at for at, link in enumerate(links) if link == SELF]
            if selves not in ([], [place]) or (len(links) > place and links[place] != SELF):
                self.notes.append(f"row {label} was left out: its X is not in its own column")
                continue
            cells.update({(place, at): link for at, link in enumerate(links[: len(self.columns)])})
        return cells

    def _cut_in_cell(self, row: Row, cells: int) -> bool:
        """True when the row may have been cut inside its last relation cell."""
        if row.cells(self.block.width).tail:
            return False
        return cells < len(self.columns) or row.line == self.last_line

    def _pair(self, i: int, j: int) -> Cell:
        if i == j:
            return SELF
        here = self.cells.get((i, j))
        return here if here is not None else self.cells.get((j, i))

    def _nic(self, at: int, gpus: list[int], others: list[int]) -> Nic:
        name = self.columns[at]
        return Nic(
            name=name,
            device=self.block.legend.get(name, None if name.startswith("NIC") else name),
            links=tuple(self._pair(at, gpu) for gpu in gpus),
            nic_links=tuple(self._pair(at, other) for other in others),
        )

    def _affinities(self, names: list[str]) -> dict[str, Affinity]:
        none = Affinity(None, (), None, 0)
        rows, width = self.block.rows, self.block.width
        found = {
            name: read_affinity(rows[name], self.block.header, rows[name].cells(width)) if name in rows else none
            for name in names
        }
        most = max(a.cells for a in found.values())
        for name, affinity in found.items():
            # Empty cells are common in containers; a row that ends the paste with fewer cells than others was cut.
            if name in rows and affinity.cells < most and rows[name].line == self.last_line:
                self.missing.append(f"the end of row {name}")
        return found

    def _report_missing(self) -> None:
        for label, row in self.block.rows.items():
            if re.match(rf"\s*{RELATION}\b", row.cells(self.block.width).tail):
                self.missing.append(f"the name of a column (row {label} has more cells than the header)")
                break
        absent = [name for at, name in enumerate(self.columns) if (at, at) not in self.cells and not self._some(at)]
        if absent:
            self.missing.append(f"{'row' if len(absent) == 1 else 'rows'} {_ranges(absent)}")
        for at, name in enumerate(self.columns):
            read = sum((at, other) in self.cells for other in range(len(self.columns)))
            if name not in absent and read < len(self.columns):
                self.missing.append(f"the end of row {name} (cut after {read} of {len(self.columns)} cells)")
        unknown = [
            f"{self.columns[i]}-{self.columns[j]}"
            for i in range(len(self.columns))
            for j in range(i + 1, len(self.columns))
            if self._pair(i, j) is None and (i, j) in self.cells and (j, i) in self.cells
        ]
        if unknown:
            self.missing.append(f"the link {', '.join(unknown)} (the cells are empty or can be read in several ways)")

    def _some(self, at: int) -> bool:
        return any((at, other) in self.cells for other in range(len(self.columns)))

    def _report_asymmetry(self, gpus: list[int]) -> None:
        for place, i in enumerate(gpus):
            for j in gpus[place + 1 :]:
                one, other = self.cells.get((i, j)), self.cells.get((j, i))
                if one is not None and other is not None and one != other:
                    names = f"{self.columns[i]}-{self.columns[j]}"
                    self.missing.append(f"one answer for {names}: {one} in one row, {other} in the other")


def _ranges(names: Sequence[str]) -> str:
    """ "GPU5, GPU6, GPU7, NIC0" as "GPU5-GPU7, NIC0"."""
    runs: list[list[str]] = []
    for name in names:
        stem, number = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
        before = runs[-1][-1] if runs else ""
        if number and before == f"{stem}{int(number) - 1}":
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
