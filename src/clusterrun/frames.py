"""Small JSON messages from the nodes to the conductor, over the standard output that srun brings back anyway.

Why not one JSON line: srun passes output on in pieces of 1,024 bytes, so a longer line of one task may be mixed with
another's. Each frame is cut into lines short enough to stay whole, and each line says whose it is:

    @@clusterrun <kind> <node> <part>/<parts> <base64>
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PAYLOAD = 600  # characters of base64 per line; with the head well below 1,024 bytes
_LINE = re.compile(r"@@clusterrun (\S+) (\S+) (\d{1,6})/(\d{1,6}) (\S+)")


def encode(kind: str, node: str, value: Any) -> str:
    """Lines to print for one message, the last with its line end."""
    text = base64.b64encode(json.dumps(value).encode()).decode()
    parts = [text[i : i + _PAYLOAD] for i in range(0, len(text), _PAYLOAD)]
    return "".join(f"@@clusterrun {kind} {node} {i}/{len(parts)} {part}\n" for i, part in enumerate(parts, start=1))


class Reader:
    """Messages of one kind, from lines that come bit by bit. Other text and damaged messages are passed over."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._parts: dict[str, dict[int, str]] = defaultdict(dict)
        self._whole: dict[str, str] = {}

    def feed(self, lines: Iterable[str]) -> None:
        for line in lines:
            match = _LINE.search(line)
            if not match or match.group(1) != self._kind:
                continue
            node, part, total = match.group(2), int(match.group(3)), int(match.group(4))
            if part == 1:
                self._parts[node].clear()
            self._parts[node][part] = match.group(5)
            if self._parts[node].keys() >= set(range(1, total + 1)):
                self._whole[node] = "".join(self._parts[node][i] for i in range(1, total + 1))

    @property
    def nodes(self) -> set[str]:
        """Nodes of which a whole message has come."""
        return set(self._whole)

    def messages(self) -> dict[str, Any]:
        """The last whole message of each node."""
        found: dict[str, Any] = {}
        for node, text in self._whole.items():
            with contextlib.suppress(ValueError):  # damaged, or not ours
                found[node] = json.loads(base64.b64decode(text, validate=True))
        return found


class FileReader(Reader):
    """The same from a file that is being written: each ``poll`` reads only what is new."""

    def __init__(self, kind: str, path: Path) -> None:
        super().__init__(kind)
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def poll(self) -> None:
        """Take in what was appended since the last call, up to its last whole line."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.feed(whole.decode(errors="replace").splitlines())


def decode(kind: str, lines: Iterable[str]) -> dict[str, Any]:
    """The last whole message of this kind from each node."""
    reader = Reader(kind)
    reader.feed(lines)
    return reader.messages()
