"""torch's distributed checkpoint (DCP) with what it lacks: digests while writing, exclusive creation, safe reading.

DCP's own reader unpickles ``.metadata`` and byte entries without restriction; here only DCP's own classes are allowed.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_crc32_options, set_crc32_options

from clusterrun.checkpoint.files import HashedFile
from clusterrun.checkpoint.manifest import FileRecord
from clusterrun.errors import CheckpointError


def write(tensors: Mapping[str, Any], directory: Path, group: dist.ProcessGroup) -> list[FileRecord]:
    """Write this rank's share of ``tensors`` into ``directory`` and return the files this rank wrote, on the disk.

    A collective over ``group``. Keys present on several ranks are written once: what differs by rank needs its own key.

    Raises:
        CheckpointException: on every rank, when any rank could not write.
        RuntimeError: a rank died or did not answer in the group's time.
    """
    writer = _Writer(directory)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with _without_crc32():
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    return writer.files.records()


def read(tensors: dict[str, Any], directory: Path) -> None:
    """Fill ``tensors`` in place with the entries of the same keys. No collective; entries not asked for are not read.

    Raises:
        CheckpointError: an entry is missing or has another shape.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            planner = _LoadPlanner(flatten_state_dict=False)
            load(tensors, storage_reader=_Reader(directory), planner=planner, no_dist=True)
    except CheckpointException as error:
        # DCP wraps the error of each rank; here there is one.
        reason = next((str(failure[0]) for failure in error.failures.values()), str(error))
        raise CheckpointError(f"{directory}: does not fit this model: {reason}") from None


def layout(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and types of the tensors in a checkpoint."""
    entries = _Reader(directory).read_metadata().state_dict_metadata
    return {
        key: (entry.size, entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


@contextmanager
def _without_crc32() -> Generator[None, None, None]:
    """torch's zip files carry a CRC-32 that torch.load never checks and that costs a third of the writing. We hash."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def objects(directory: Path) -> list[str]:
    """Keys of the entries that are no tensors."""
    entries = _Reader(directory).read_metadata().state_dict_metadata
    return [key for key, entry in entries.items() if isinstance(entry, BytesStorageMetadata)]


class _HashedFiles(FileSystem):
    """DCP's door to the file system: every file it writes passes here."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[int, str]] = {}

    def records(self) -> list[FileRecord]:
        return [FileRecord(name, size, digest) for name, (size, digest) in self._written.items()]

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if "w" not in mode:
            raise AssertionError("this file system only writes")
        stream = HashedFile(Path(path))
        try:
            yield stream
            self._written[Path(path).name] = stream.finish()
        except BaseException as error:
            stream.abandon()
            cause = stream.error or error
            if isinstance(cause, OSError) and cause.filename is None:
                cause.filename = os.fspath(path)
            raise cause from None

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.rename(path, new_path)
        self._written[Path(new_path).name] = self._written.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """One file per rank, written by one thread: with more, DCP can swallow an OSError."""

    def __init__(self, directory: Path) -> None:
        # sync_files is off because HashedFile syncs by itself.
        super().__init__(directory, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        self.files = _HashedFiles()
        self.fs = self.files

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # no path in it: the directory is renamed later


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{self.path}: .metadata holds a {type(metadata).__name__}, not DCP's metadata")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if read_item.type is not LoadItemType.BYTE_IO:
            raise AssertionError("load_bytes is for byte entries")
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        self.original_state_dict[read_item.dest_index.fqn] = self.state_dict[read_item.dest_index.fqn]


_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Makes nothing but DCP's metadata classes and torch's types."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _ALLOWED:
            return cast(Any, super().find_class(module, name))
        raise CheckpointError(f".metadata asks for {module}.{name}, which is not part of a checkpoint; not loaded")
