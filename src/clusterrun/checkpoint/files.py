"""A new file that is hashed while it is written, and durable when it is finished. Torch-free."""

from __future__ import annotations

import ctypes
import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

BUFFER = 4 * 1024 * 1024  # bytes handed to the file system at once
WRITEBACK = 32 * 1024 * 1024  # bytes after which the kernel is asked to begin writing to the disk
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


class HashedFile(io.RawIOBase):
    """A new file whose content is hashed as it is written. ``finish`` closes it durably; else ``abandon`` it.

    The kernel is asked to write to the disk early: left to itself it begins when a tenth of the memory is dirty, and
    all of the writing would fall into the fsync, while nothing else is done.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = io.BufferedWriter(io.FileIO(self._fd, "w"), BUFFER)
        self._hash = xxhash.xxh3_128()
        self._size = self._begun = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error  # torch's zip writer, through which this passes, makes something unreadable of it
            raise
        self._hash.update(data)
        size = memoryview(data).nbytes
        self._size += size
        if self._size - self._begun >= WRITEBACK:
            _begin_writeback(self._fd, self._begun, self._size - self._begun)
            self._begun = self._size
        return size

    def tell(self) -> int:
        return self._size

    def finish(self) -> tuple[int, str]:
        """Flush, fsync and close; size in bytes and digest. Never repeated: a failed fsync loses data.

        Raises:
            OSError: NFS may tell of a full disk only here.
        """
        self._file.flush()
        os.fsync(self._fd)
        self._file.close()
        return self._size, self._hash.hexdigest()

    def abandon(self) -> None:
        """Close after a failure; the content is worthless, so errors do not matter."""
        try:
            self._file.raw.close()
        except OSError:
            return


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    found: Callable[..., int] = function
    return found


def _begin_writeback(fd: int, start: int, size: int) -> None:
    """Start writing a part of a file to the disk. A hint: what fails shows at fsync, which is always made."""
    function = _sync_file_range()
    if function is not None:
        function(fd, start, size, _SYNC_FILE_RANGE_WRITE)
