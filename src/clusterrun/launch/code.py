"""Which code a run was submitted with: the git commit, what differs from it, and on request a copy to train from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from clusterrun import process
from clusterrun.config.schema import RunConfig
from clusterrun.errors import CommandError, ConfigError
from clusterrun.rundir import CodeDir, SweepDir, make_private, write_durably

_GIT_TIMEOUT_S = 30.0
_MOST_DIFF_BYTES = 10 << 20


def place_of(config: RunConfig) -> Path:
    """Where the code is: at the script, or where one submits from."""
    return Path(config.train.script).parent if config.train.script else Path.cwd()


def root_of(place: Path) -> Path | None:
    """The top of the git tree around a directory; None when there is none, or no git."""
    try:
        return Path(_git(place, "rev-parse", "--show-toplevel").strip())
    except CommandError:
        return None


@dataclass(frozen=True)
class Found:
    """Code as it is now. ``root`` is the top of its git tree, None when there is none."""

    root: Path | None
    about: dict[str, object]
    diff: str


def look(config: RunConfig) -> Found:
    """Commit and uncommitted diff. Code that is under no git is said to be so; nothing is refused for it."""
    place = place_of(config)
    root = root_of(place)
    if root is None:
        return Found(None, {"directory": str(place), "git": None}, "")
    about: dict[str, object] = {"directory": str(place), "git": str(root)}
    try:
        about["commit"] = _git(root, "rev-parse", "HEAD").strip()
        about["branch"] = _git(root, "rev-parse", "--abbrev-ref", "HEAD").strip()
        diff = _git(root, "diff", "--no-ext-diff", "--no-color", "--binary", "HEAD")
    except CommandError:  # no commit yet
        about["commit"], diff = None, ""
    about["untracked"] = _names(root, "--others", "--exclude-standard")
    if len(diff) > _MOST_DIFF_BYTES:
        about["diff"], diff = f"left out: {len(diff)} bytes", ""
    elif diff:
        about["diff"] = CodeDir(place).diff.name
    if config.snapshot:
        about["tree"] = _digest(root)
    return Found(root, about, diff)


def record(config: RunConfig, code: CodeDir) -> None:
    """Write down which code it is; with ``snapshot``, beside a copy of it."""
    _keep(look(config), config, code)


def shared_by(config: RunConfig, sweep: SweepDir) -> CodeDir:
    """The record (and the copy) that points of a sweep share: an earlier submission's while the code is the same."""
    found = look(config)
    for code in sweep.codes():
        with contextlib.suppress(OSError, ValueError):  # one that a killed submission left unfinished
            diff = code.diff.read_text(encoding="utf-8") if code.diff.exists() else ""
            if json.loads(code.about.read_text(encoding="utf-8")) == found.about and diff == found.diff:
                return code
    code = sweep.new_code()
    _keep(found, config, code)
    return code


def _keep(found: Found, config: RunConfig, code: CodeDir) -> None:
    make_private(code.root)
    if config.snapshot and found.root is not None:
        copy = make_private(code.tree)
        for path in _tree(found.root):
            target = copy / path.relative_to(found.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)
    if found.diff:
        write_durably(code.diff, found.diff)
    write_durably(code.about, json.dumps(found.about, indent=1))  # last: it says that the rest is whole


def check_snapshot(config: RunConfig) -> None:
    """Whether a copy can be made. Raises ConfigError."""
    if not config.snapshot:
        return
    root = root_of(place_of(config))
    if root is None:
        raise ConfigError(f"snapshot=true: {place_of(config)} is in no git repository; git init there, or leave it out")
    size = sum(path.lstat().st_size for path in _tree(root))
    if size > config.snapshot_limit_mb << 20:
        largest = sorted(_tree(root), key=lambda path: -path.lstat().st_size)[:3]
        names = ", ".join(f"{path.relative_to(root)} ({path.lstat().st_size >> 20} MiB)" for path in largest)
        raise ConfigError(
            f"snapshot=true: {root} has {size >> 20} MiB, more than snapshot_limit_mb={config.snapshot_limit_mb}; "
            f"the largest: {names}. Ignore them in .gitignore, or raise the limit"
        )


def from_copy(config: RunConfig, code: CodeDir) -> RunConfig:
    """The configuration whose script lies in the copy; as it is without one."""
    root, script = _copied_from(code), config.train.script
    if root is None or script is None:
        return config
    return replace(config, train=replace(config.train, script=str(_moved(Path(script), root, code.tree))))


@contextlib.contextmanager
def inside(code: CodeDir) -> Iterator[None]:
    """In here the current directory and PYTHONPATH are the copy's, for what is submitted. Without a copy nothing is."""
    root = _copied_from(code)
    if root is None:
        yield
        return
    before, paths = Path.cwd(), os.environ.get("PYTHONPATH")
    try:
        os.chdir(_moved(before, root, code.tree))
        mapped = [str(_moved(Path(p).absolute(), root, code.tree)) for p in (paths or "").split(os.pathsep) if p]
        os.environ["PYTHONPATH"] = os.pathsep.join(mapped)
        use_copy(code)
        yield
    finally:
        os.chdir(before)
        os.environ.pop("PYTHONPATH")
        if paths is not None:
            os.environ["PYTHONPATH"] = paths


def _copied_from(code: CodeDir) -> Path | None:
    """Whose copy it is; None when there is none."""
    if not code.tree.is_dir():
        return None
    return Path(json.loads(code.about.read_text(encoding="utf-8"))["git"])


def use_copy(code: CodeDir) -> None:
    """Have Python in what is started from here look into the run's copy of the code first, when it has one."""
    if not code.tree.is_dir():
        return
    own = [str(place) for place in (code.tree / "src", code.tree) if place.is_dir()]
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*own, *(p for p in before.split(os.pathsep) if p)]))


def _moved(path: Path, root: Path, copy: Path) -> Path:
    """The place in the copy of a path of the tree; a path elsewhere, or one that was not copied, as it is."""
    try:
        moved = copy / path.resolve().relative_to(root.resolve())
    except ValueError:
        return path
    return moved if moved.exists() else path


def _digest(root: Path) -> str:
    """Of names, sizes and times: whether a copy is still what it was made of."""
    stats = ((path, path.lstat()) for path in _tree(root))
    text = "\n".join(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _tree(root: Path) -> list[Path]:
    names = _names(root, "--cached", "--others", "--exclude-standard")
    paths = [root / name for name in names]
    return [path for path in paths if path.is_symlink() or path.is_file()]  # not what was deleted, nor submodules


def _names(root: Path, *which: str) -> list[str]:
    return [name for name in _git(root, "ls-files", "-z", *which).split("\0") if name]


def _git(place: Path, *arguments: str) -> str:
    # A repository's own settings must not start programs here (fsmonitor, textconv).
    argv = ["git", "-C", str(place), "-c", "core.fsmonitor=false", "-c", "core.quotepath=false", *arguments]
    return process.run(argv, timeout_s=_GIT_TIMEOUT_S)
