"""The directory of checkpoints: how one is published, found, verified and retired. Torch-free.

Made for NFS: what is visible under ``step-<8 digits>`` is complete and on the disk. A checkpoint is written in a
temporary directory beside it, its manifest comes last, and a rename publishes it. Only rank 0 changes names.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from clusterrun.checkpoint.manifest import MANIFEST, FileRecord, Manifest, hash_stream
from clusterrun.checkpoint.retention import Keep, Score
from clusterrun.errors import CheckpointError
from clusterrun.rundir import sync_directory, write_durably

LATEST = "LATEST"
SCORES = "SCORES.json"
_STEP = re.compile(r"step-\d{8,}")
_TEMPORARY = re.compile(r"\.tmp-step-(\d+)-(\d+)-[0-9a-f]+")
_SMALL = re.compile(r"\.(LATEST|SCORES\.json)\.\d+\.tmp")  # of write_durably, killed in between
_BAD = re.compile(r"\.bad-step-\d{8,}-[0-9a-f]+")
_TRASH = re.compile(r"\.trash-step-\d{8,}-[0-9a-f]+")

T = TypeVar("T")
Warn = Callable[[str], None]
StepsAndPaths = list[tuple[int, Path]]
Strings = list[str]  # named here, since inside the class ``list`` is the method


def step_name(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class CheckpointInfo:
    """A published checkpoint as listed. ``manifest`` is None, and ``problem`` says why, when it can't be trusted."""

    step: int
    path: Path
    manifest: Manifest | None
    problem: str | None = None

    @property
    def bytes(self) -> int | None:
        return self.manifest.bytes if self.manifest else None

    @property
    def created(self) -> float | None:
        """Unix time in seconds."""
        return self.manifest.created if self.manifest else None


Listing = list[CheckpointInfo]


@dataclass(frozen=True)
class Store:
    """The checkpoints of one run.

    Attributes:
        directory: where they are; need not exist yet.
        patience_s: how long a file of a checkpoint younger than that may stay invisible: an NFS client can lag so far.
        guard: raises FencedError when this process may no longer change names here; asked right before each change.
    """

    directory: Path
    patience_s: float = 30.0
    guard: Callable[[], None] = lambda: None

    def list(self) -> Listing:
        """Published checkpoints, newest first. Reads the manifests, but not the other files."""
        found = []
        for name in self._names():
            if _STEP.fullmatch(name) and name == step_name(step := int(name[len("step-") :])):
                found.append(self._info(step, self.directory / name))
        return sorted(found, key=lambda info: info.step, reverse=True)

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint that looks whole (manifest intact, all files there with the right size)."""
        return next((info.step for info in self.list() if self.looks_whole(info)), None)

    def has_remains(self) -> bool:
        """Whether checkpoints exist or were set aside, valid or not: then a run must not begin again from step 0."""
        return any(_STEP.fullmatch(name) or _BAD.fullmatch(name) for name in self._names())

    def set_aside_before(self) -> StepsAndPaths:
        """Checkpoints that were found invalid and renamed, newest step first."""
        found = [(int(name.split("-")[2]), self.directory / name) for name in self._names() if _BAD.fullmatch(name)]
        return sorted(found, reverse=True)

    def being_written(self, attempt: int) -> int | None:
        """Step of the checkpoint that this attempt is writing now, None when it writes none."""
        found = [_TEMPORARY.fullmatch(name) for name in self._names()]
        return max((int(m.group(1)) for m in found if m and int(m.group(2)) == attempt), default=None)

    def looks_whole(self, info: CheckpointInfo) -> bool:
        """A cheap check without reading the files: manifest intact, all files there with the right size."""
        if info.manifest is None:
            return False
        try:
            return all((info.path / record.name).stat().st_size == record.size for record in info.manifest.files)
        except OSError:
            return False

    def verify(self, info: CheckpointInfo, records: Iterable[FileRecord] | None = None) -> Strings:
        """Read the files (all, or ``records``) and hold them against the manifest. Returns what is wrong with them."""
        if info.manifest is None:
            return [info.problem or f"{info.path}: no manifest"]
        problems = []
        patience_s = max(0.0, min(self.patience_s, info.manifest.created + self.patience_s - time.time()))
        deadline = time.monotonic() + patience_s  # for all files together
        for record in info.manifest.files if records is None else records:
            path = info.path / record.name
            try:
                size, digest = _patiently(path, deadline, hash_stream)
            except OSError as error:
                problems.append(f"{path}: can't be read: {error.strerror}")
                continue
            if size != record.size:
                problems.append(f"{path}: has {size} bytes, the manifest says {record.size}")
            elif digest != record.digest:
                problems.append(f"{path}: damaged, its digest is not the manifest's")
        return problems

    # What follows changes names in the directory: rank 0 only.

    def new_temporary(self, step: int, attempt: int) -> tuple[Path, str]:
        """Make a directory to write a checkpoint in. Returns it and the nonce in its name."""
        nonce = secrets.token_hex(8)
        path = self.directory / f".tmp-step-{step}-{attempt}-{nonce}"
        self.directory.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # ours: NFS can repeat a call that succeeded and report its failure
            path.mkdir(mode=0o700)
        sync_directory(self.directory)
        return path, nonce

    def publish(self, temporary: Path, manifest: Manifest, warn: Warn) -> CheckpointInfo:
        """Make a written directory a checkpoint. All of ``manifest.files`` must be on the disk already.

        A valid checkpoint of this step that is there already stays, and counts as success; an invalid one is set aside.

        Raises:
            OSError: the disk is full or failing. Nothing was published, and what was there before is untouched.
            FencedError: this is an attempt that another one has taken the place of.
        """
        target = self.directory / step_name(manifest.step)
        _write_new(temporary / MANIFEST, manifest.to_json())
        sync_directory(temporary)
        if os.path.lexists(target):
            present = self._info(manifest.step, target)
            if not self.verify(present):
                self.discard(temporary)
                return present
            self.set_aside(present)
            warn(f"{target}: was invalid and is set aside; writing that step anew")
        self.guard()
        try:
            os.rename(temporary, target)
        except OSError:
            # NFS can repeat a rename that succeeded, and report the repetition's failure.
            self._names()  # or the client goes on believing that the target is not there
            published = self._info(manifest.step, target)
            if published.manifest is None or published.manifest.nonce != manifest.nonce:
                raise
        sync_directory(self.directory)
        try:
            write_durably(self.directory / LATEST, target.name + "\n")
        except OSError as error:
            warn(f"{self.directory / LATEST}: can't be written ({error.strerror}); it is only a hint")
        return CheckpointInfo(manifest.step, target, manifest)

    def discard(self, temporary: Path) -> None:
        """Remove a temporary directory; never raises, since what is left is removed by a later attempt."""
        shutil.rmtree(temporary, ignore_errors=True)

    def set_aside(self, info: CheckpointInfo) -> Path:
        """Rename an invalid checkpoint so that nothing takes it for valid, and keep it. Raises CheckpointError."""
        aside = self.directory / f".bad-{info.path.name}-{secrets.token_hex(4)}"
        self.guard()
        try:
            self._rename(info.path, aside)
            sync_directory(self.directory)
        except OSError as error:
            raise CheckpointError(f"{info.path}: invalid, and can't be set aside: {error.strerror}") from None
        return aside

    def retain(self, keep: Keep, warn: Warn) -> Listing:
        """Remove those that look whole and that ``keep`` does not want. Returns what was removed.

        Checkpoints that do not look whole are neither counted nor touched. Raises FencedError, nothing else.
        """
        removed = []
        whole = [info for info in self.list() if self.looks_whole(info)]
        kept = keep.steps((info.step for info in whole), self.scores(warn) if keep.best else {})
        self.guard()
        for info in whole:
            if info.step in kept:
                continue
            trash = self.directory / f".trash-{info.path.name}-{secrets.token_hex(4)}"
            try:
                self._rename(info.path, trash)
            except OSError as error:
                warn(f"{info.path}: can't be removed: {error.strerror}")
                continue
            removed.append(info)
        for name in self._names():
            if _TRASH.fullmatch(name):
                shutil.rmtree(self.directory / name, ignore_errors=True)
        return removed

    def scores(self, warn: Warn) -> dict[int, Score]:
        """Validation results by step, as ``add_score`` left them."""
        try:
            text = (self.directory / SCORES).read_text(encoding="utf-8")
            return {int(step): Score(**score) for step, score in json.loads(text).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            warn(f"{self.directory / SCORES}: can't be read, so no checkpoint is kept for its score: {error}")
            return {}

    def add_score(self, step: int, score: Score, warn: Warn) -> None:
        """Remember a validation result, for ``retain``. Never raises: no state depends on it."""
        scores = {**self.scores(warn), step: score}
        try:
            self.directory.mkdir(mode=0o700, exist_ok=True)
            write_durably(self.directory / SCORES, json.dumps({step: asdict(scores[step]) for step in sorted(scores)}))
        except OSError as error:
            warn(f"{self.directory / SCORES}: can't be written: {error.strerror}")

    def remove_stale_temporaries(self, attempt: int) -> None:
        """Remove what this attempt and earlier ones left unfinished; to be called before the first save.

        Its own are there when torchrun started the workers anew. One that still writes there fails, and harms nothing.
        """
        for name in self._names():
            if (match := _TEMPORARY.fullmatch(name)) and int(match[2]) <= attempt:
                self.discard(self.directory / name)
            elif _SMALL.fullmatch(name):
                with contextlib.suppress(OSError):
                    os.unlink(self.directory / name)

    def _rename(self, path: Path, unique: Path) -> None:
        """Rename to a name that nobody else uses, so that success can be told from what is there."""
        try:
            os.rename(path, unique)
        except OSError:
            names = self._names()
            if unique.name not in names or path.name in names:
                raise

    def _names(self) -> Strings:
        """What is there now: an NFS client asks the server again when a directory is opened."""
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                return os.listdir(self.directory)
            # A client may remember for half a minute that it was not there, unless the parent is seen to have changed.
            with contextlib.suppress(OSError):
                os.listdir(self.directory.parent)
        return []

    def _info(self, step: int, path: Path) -> CheckpointInfo:
        file = path / MANIFEST
        try:
            text = _patiently(file, 0.0, lambda stream: stream.read())  # open, not stat: cached attributes lie
            manifest = Manifest.from_json(text.decode(), file)
        except OSError as error:
            return CheckpointInfo(step, path, None, f"{file}: can't be read: {error.strerror}")
        except UnicodeDecodeError:
            return CheckpointInfo(step, path, None, f"{file}: damaged, not text")
        except CheckpointError as error:
            return CheckpointInfo(step, path, None, str(error))
        if manifest.step != step:
            return CheckpointInfo(step, path, None, f"{file}: is of step {manifest.step}, the directory says {step}")
        return CheckpointInfo(step, path, manifest)


def _write_new(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def _patiently(path: Path, deadline: float, read: Callable[[io.FileIO], T]) -> T:
    """What ``read`` makes of a file. While it is missing or its handle is stale it is looked for again, until
    ``deadline`` (of time.monotonic) or until its directory is gone too.

    A read that breaks off is made anew once: an NFS server that was restarted may have forgotten the open file.
    """
    tries_left = 1
    while True:
        try:
            with path.open("rb", buffering=0) as stream:
                return read(stream)
        except OSError as error:
            if error.errno in (errno.EIO, errno.ESTALE) and tries_left:
                tries_left -= 1
            elif error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() >= deadline:
                raise
            try:
                os.listdir(path.parent)  # makes an NFS client look again
            except FileNotFoundError:  # retired meanwhile
                raise error from None
            except OSError:
                pass
        time.sleep(0.5)
