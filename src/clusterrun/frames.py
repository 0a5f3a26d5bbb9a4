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
from typing import Any

_PAYLOAD = 600  # characters of base64 per line; with the head well below 1,024 bytes
_LINE = re.compile(r"@@clusterrun (\S+) (\S+) (\d{1,6})/(\d{1,6}) (\S+)")


def encode(kind: str, node: str, value: Any) -> str:
    """Lines to print for one message, the last with its line end."""
    text = base64.b64encode(json.dumps(value).encode()).decode()
    parts = [text[i : i + _PAYLOAD] for i in range(0, len(text), _PAYLOAD)]
    return "".join(f"@@clusterrun {kind} {node} {i}/{len(parts)} {part}\n" for i, part in enumerate(parts, start=1))


def decode(kind: str, lines: Iterable[str]) -> dict[str, Any]:
    """The last complete message of this kind from each node. Other text, and messages cut short, are passed over."""
    parts: dict[str, dict[int, str]] = defaultdict(dict)
    found: dict[str, Any] = {}
    for line in lines:
        match = _LINE.search(line)
        if not match or match.group(1) != kind:
            continue
        node, part, total = match.group(2), int(match.group(3)), int(match.group(4))
        if part == 1:
            parts[node].clear()
        parts[node][part] = match.group(5)
        if len(parts[node]) == total:
            with contextlib.suppress(KeyError, ValueError):  # damaged, or not ours
                text = "".join(parts[node][i] for i in range(1, total + 1))
                found[node] = json.loads(base64.b64decode(text, validate=True))
    return found
