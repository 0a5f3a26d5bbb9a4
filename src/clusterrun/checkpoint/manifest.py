"""MANIFEST.json: what a checkpoint holds, with a digest of every file and of itself. Torch-free."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from clusterrun.errors import CheckpointError

MANIFEST = "MANIFEST.json"
FORMAT = 1
BLOCK = 4 * 1024 * 1024  # bytes read at once while hashing


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint: size in bytes and xxh3-128 digest (it finds damage; it is no proof against forgery)."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents.

    Attributes:
        nonce: unique to the attempt to write; tells "our rename went through" from "another's directory is there".
        created: when, Unix time in seconds.
        trainer: all state that is not a tensor, as JSON.
    """

    step: int
    world_size: int
    attempt: int
    nonce: str
    config_hash: str
    created: float
    versions: Mapping[str, str]
    trainer: Mapping[str, Any]
    files: tuple[FileRecord, ...] = field(default_factory=tuple)

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(record.size for record in self.files)

    def to_json(self) -> str:
        """The text of the file, which ends with a digest of all before it."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, "digest": _digest(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: Path) -> Manifest:
        """Raises CheckpointError when the text is not a whole, undamaged manifest of this format."""
        try:
            content = json.loads(text)
            said = content.pop("digest")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{where}: not a manifest, or cut short") from None
        if said != _digest(content):
            raise CheckpointError(f"{where}: damaged, its digest does not fit its content")
        if content.pop("format") != FORMAT:
            raise CheckpointError(f"{where}: written by another version of clusterrun; this one reads format {FORMAT}")
        files = tuple(FileRecord(**record) for record in content.pop("files"))
        manifest = cls(**content, files=files)
        if manifest.to_json() != text:  # damage that JSON does not mind, such as another blank
            raise CheckpointError(f"{where}: damaged, not as it was written")
        return manifest


def hash_stream(stream: io.BufferedIOBase | io.RawIOBase) -> tuple[int, str]:
    """Size in bytes and digest of what is left to read."""
    size, state = 0, xxhash.xxh3_128()
    block = memoryview(bytearray(BLOCK))  # one for all: new memory for each would cost more than the hashing
    while count := stream.readinto(block):
        size += count
        state.update(block[:count])
    return size, state.hexdigest()


def share(records: Iterable[FileRecord], part: int, of: int) -> list[FileRecord]:
    """Part number ``part`` of ``of`` about equal parts: the largest files go first, each to who has least."""
    parts: list[list[FileRecord]] = [[] for _ in range(of)]
    loads = [0] * of
    for record in sorted(records, key=lambda r: (-r.size, r.name)):
        least = loads.index(min(loads))
        parts[least].append(record)
        loads[least] += record.size
    return parts[part]


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode())
