"""Groups the lines of a paste into matrices: which rows belong to which header, also when machines are interleaved."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from clusterrun.topology.grammar import GPU_NAME, RELATION, ascending, like_affinity, read_cells
from clusterrun.topology.lines import Header, Row, find_header, find_rows, row_labels
from clusterrun.topology.model import SELF
from clusterrun.topology.streams import stream_key

_NIC_LEGEND = re.compile(r"(?<![\w.])(NIC\d+):[ \t]+([A-Za-z][\w.\-]*)")
_NICS_HIDDEN = re.compile(r"(\d+) NICs? found in the topology, only displaying (\d+)")
_P2P_COMMAND = re.compile(r"topo\b.*-p2p")
_P2P_LEGEND = re.compile(r"\bOK\s+= Status Ok")
_ROW_END = re.compile(r"[\s>]*[\d,\-][\d,\- N/A]*$")
_CELL = re.compile(rf"\b{RELATION}\b")
_PART_OF_LIST = re.compile(r"[\d,\-]+|N/?A?|/?A")


@dataclass
class Block:
    """One matrix while it is being read.

    Attributes:
        header: its header; None for rows whose header was lost.
        line: number of the header's last physical line.
        rows: by label, in order of appearance.
        keys: stream keys of header and rows.
        peer: it is a matrix of ``topo -p2p``, not of links.
        legend: "NIC0" to device name.
        hidden_nics: how many NICs the driver did not display.
    """

    header: Header | None
    line: int
    rows: dict[str, Row] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    peer: bool = False
    maybe_peer: bool = False
    legend: dict[str, str] = field(default_factory=dict)
    hidden_nics: int = 0

    @property
    def width(self) -> int | None:
        """Relation cells per row; None without a header, and when the header itself was cut."""
        return None if self.header is None or self.open_ended else len(self.header.names)

    @property
    def open_ended(self) -> bool:
        """The header was cut, so rows may have more devices than it names."""
        return self.header is not None and self.header.cut and len(self.header.titles) < 1

    def expected(self) -> str | None:
        """The label of the next row, when rows come in column order; None when all are there."""
        names = self.header.names if self.header else ()
        return next((name for name in names if name not in self.rows), None)

    def _beyond(self, row: Row) -> bool:
        """The row comes right after the others, of a device behind the end of a header that the screen cut."""
        if self.header is None or self.header.titles or not self.rows or row.label in self.header.names:
            return False
        last = max(self.rows.values(), key=lambda other: other.line)
        return row.line - last.line == 1 and row.prefix == last.prefix

    def fits(self, row: Row) -> bool:
        """True when the row can belong here: its label is a column, and the X stands at its own place."""
        cells = row.cells(self.width)
        if self.header is None or self._beyond(row):
            selves = [at for at, link in enumerate(cells.links) if link == SELF]
            return len(selves) <= 1 and any(char.isdigit() for char in row.label) and like_affinity(cells.tail)
        if row.label not in self.header.names:
            return False
        place = self.header.names.index(row.label)
        return all((at == place) == (link == SELF) for at, link in enumerate(cells.links) if link is not None)


def group(lines: Sequence[str]) -> list[Block]:
    """Every matrix in the paste, in order of appearance, link matrices and peer matrices alike."""
    return _Grouper(lines).run()


class _Grouper:
    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines
        self.labels = row_labels(lines)
        self.wraps = _wraps(lines)
        self.blocks: list[Block] = []
        self.open: list[Block] = []  # those that may get more rows
        self.recent: dict[str, Block] = {}  # where each sender's last line went
        self.peer_command = False
        self.previous: Row | Block | None = None  # what the line just before was, when a wrapped line could go on

    def run(self) -> list[Block]:
        for number, line in enumerate(self.lines):
            self.previous = self._line(number, line) if line.strip() else None
        return self.blocks

    def _line(self, number: int, line: str) -> Row | Block | None:
        for row in find_rows(line, number):
            block = self._place(row)
            if block is not None:
                return self._add(block, row)
        if isinstance(self.previous, Block) and self._continue_header(self.previous, line, number):
            return self.previous
        header = find_header(line, self.labels)
        if header is not None and (header.titled or self._row_follows(header, number)):
            key = stream_key(header.prefix)
            block = Block(header, number, keys={key}, maybe_peer=self.peer_command)
            self.peer_command = False
            return self._open(block, key)
        if isinstance(self.previous, Row) and self._continue_row(self.previous, line, number):
            return self.previous
        self._aside(line)
        return None

    def _row_follows(self, header: Header, number: int) -> bool:
        """A line of names without a title is a header only when a row comes next ("GPU0 GPU1" can be prose)."""
        key = stream_key(header.prefix)
        following = [line for line in self.lines[number + 1 : number + 60] if line.strip()]
        return any(
            row.label in header.names and (at < 6 or (key and stream_key(row.prefix) == key))
            for at, line in enumerate(following)
            for row in find_rows(line, 0)
        )

    def _place(self, row: Row) -> Block | None:
        """The block a row belongs to, made when needed; None when the line only looks like a row."""
        key = stream_key(row.prefix)
        waiting = [block for block in self.open if row.label not in block.rows]
        same = [block for block in waiting if key in block.keys and block.fits(row)]
        pool = same or [block for block in waiting if block.fits(row)]
        if pool:
            # The block that this sender's last line went to, then one that waits for this label, then the latest.
            recent = self.recent.get(key)
            best = max(enumerate(pool), key=lambda at: (at[1] is recent, at[1].expected() == row.label, at[0]))[1]
            return self._rejoin(best, row)
        latest = self.blocks[-1] if self.blocks else None
        if latest is None:
            block = Block(None, row.line)
            if GPU_NAME.fullmatch(row.label) and SELF in row.cells(None).links and block.fits(row):
                return self._open(block, key)
            return None
        names = latest.header.names if latest.header else tuple(latest.rows)
        repeated = row.label in latest.rows and latest.rows[row.label].text.split() == row.text.split()
        if latest.fits(row) and row.label == names[0] and not repeated:
            return self._open(Block(latest.header, row.line), key)  # another machine, whose header was not pasted
        return None

    def _open(self, block: Block, key: str) -> Block:
        """Start a block; blocks that have all their rows are no longer asked for new ones."""
        self.open = [old for old in self.open if old.expected() is not None or old.header is None]
        self.open.append(block)
        self.blocks.append(block)
        self.recent[key] = block
        return block

    def _rejoin(self, block: Block, row: Row) -> Block:
        """A header repeated in the middle of a matrix (a pager does that) goes on with the matrix before it."""
        if block.rows or block is not self.blocks[-1] or len(self.blocks) < 2:
            return block
        before = self.blocks[-2]
        if before.header is None or block.header is None:
            return block
        goes_on = before.rows and row.label == before.expected() != block.header.names[0]
        if goes_on and before.header.names == block.header.names:
            self.blocks.remove(block)
            self.open.remove(block)
            return before
        return block

    def _add(self, block: Block, row: Row) -> Row:
        cells = row.cells(block.width)
        block.peer = block.peer or (cells.peer_words and (block.width is None or len(cells.links) < block.width))
        block.rows[row.label] = row
        key = stream_key(row.prefix)
        block.keys.add(key)
        self.recent[key] = block
        return row

    def _continue_header(self, block: Block, line: str, number: int) -> bool:
        if block.rows or block.header is None:
            return False
        old = block.header
        body = _body(line, old.prefix)
        found = [find_header(old.text + glue + body, self.labels) for glue in _glues(body)]
        better = [new for new in found if new and new.pure and not new.prefix and self._gains(old, new)]
        if not better:
            return False
        best = max(better, key=self._plausible)
        block.header = replace(best, title_at=(), prefix=old.prefix)
        block.line = number
        return True

    def _gains(self, old: Header, new: Header) -> bool:
        """A joint is good for more columns, or for a last name that rows bear out ("mlx5" and "_9")."""
        if (len(new.names), len(new.titles)) > (len(old.names), len(old.titles)):
            return True
        return new.names != old.names and new.names[-1] in self.labels and old.names[-1] not in self.labels

    def _plausible(self, header: Header) -> tuple[int, int]:
        """Ranks two ways to join a wrapped header: names that rows bear out, then titles."""
        names = {*header.names}
        return (len(names & self.labels) - len(names - self.labels), len(header.titles))

    def _continue_row(self, row: Row, line: str, number: int) -> bool:
        """Join a line that a terminal or a mail client wrapped to the row it belongs to."""
        block = next((b for b in reversed(self.blocks) if b.rows.get(row.label) is row), None)
        if block is None or block.width is None or block.header is None:
            return False
        width, titles = block.width, len(block.header.titles)
        body = _body(line, row.prefix)
        now = row.cells(width)
        full = len(now.links) == width and len(now.tail.split()) >= titles
        open_list = body.startswith((",", "-")) or now.tail.rstrip().endswith((",", "-")) or self.wraps
        if not body.strip() or (full and not (open_list and re.match(r"[\d,\-]", body))):
            return False
        best: tuple[int, str] | None = None
        for glue in ("",) if full else _glues(body):
            text = (row.text if glue else row.text.rstrip()) + glue + body
            cells = read_cells(text[len(row.label) :], width)
            words = cells.tail.split()
            if len(cells.links) < width:
                good = not words and len(cells.links) > len(now.links)
            else:
                good = len(words) <= titles and all(_PART_OF_LIST.fullmatch(word) for word in words)
            # Whole lists and an exact number of cells are the best signs that the joint is right.
            whole = all(ascending(word) or word == "N/A" for word in words)
            score = (len(cells.links) == width) + (len(words) == titles) + whole
            if good and (best is None or score > best[0]):
                best = (score, text)
        if best is None:
            return False
        row.text, row.line, row.joined = best[1], number, True
        self._add(block, row)
        return True

    def _aside(self, line: str) -> None:
        """Lines that are neither header nor row may still say something: the NIC legend, a command, a warning."""
        self.peer_command = self.peer_command or bool(_P2P_COMMAND.search(line))
        if not self.blocks:
            return
        latest = self.blocks[-1]
        if _P2P_LEGEND.search(line) and not (latest.header and latest.header.titles):
            latest.maybe_peer = True
        hidden = _NICS_HIDDEN.search(line)
        if hidden:
            latest.hidden_nics = int(hidden[1]) - int(hidden[2])
        for match in _NIC_LEGEND.finditer(line):
            self._legend(match[1], match[2], stream_key(line[: match.start()]))

    def _legend(self, column: str, device: str, key: str) -> None:
        named = (b for b in reversed(self.blocks) if b.header and column in b.header.names and not b.peer)
        recent = self.recent.get(key) if key else None
        block = recent if recent and recent.header and column in recent.header.names else next(named, None)
        if block is not None:
            block.legend.setdefault(column, device)


def _wraps(lines: Sequence[str]) -> bool:
    """True when the ends of rows stand on lines of their own, again and again: the paste was wrapped at a width."""
    pairs = itertools.pairwise(lines)
    return sum(bool(_ROW_END.match(after)) and bool(_CELL.search(line)) for line, after in pairs) > 1


def _body(line: str, prefix: str) -> str:
    """A continuation line without the indentation, quoting or label that its first line had."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(line, prefix, strict=False)))
    return line[same:]


def _glues(body: str) -> tuple[str, ...]:
    """How a wrapped line may join: cut inside a cell (nothing between), or between cells."""
    return (" ",) if body[:1].isspace() else ("", " ")
