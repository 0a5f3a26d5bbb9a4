"""Which code a run was submitted with: the git commit, what differs from it, and on request a copy to train from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from clusterrun import process
from clusterrun.config.schema import RunConfig
from clusterrun.errors import CommandError, ConfigError
from clusterrun.rundir import CodeDir, RunDir, make_private, write_durably

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


def record(config: RunConfig, code: CodeDir) -> None:
    """Write down commit and uncommitted diff. Code that is under no git is said to be so; nothing is refused for it."""
    place = place_of(config)
    root = root_of(place)
    make_private(code.root)
    if root is None:
        write_durably(code.about, json.dumps({"directory": str(place), "git": None}, indent=1))
        return
    about: dict[str, object] = {"directory": str(place), "git": str(root)}
    try:
        about["commit"] = _git(root, "rev-parse", "HEAD").strip()
        about["branch"] = _git(root, "rev-parse", "--abbrev-ref", "HEAD").strip()
        diff = _git(root, "diff", "--no-ext-diff", "--no-color", "--binary", "HEAD")
    except CommandError:  # no commit yet
        about["commit"], diff = None, ""
    about["untracked"] = _names(root, "--others", "--exclude-standard")
    if len(diff) > _MOST_DIFF_BYTES:
        about["diff"] = f"left out: {len(diff)} bytes"
    elif diff:
        about["diff"] = code.diff.name
        write_durably(code.diff, diff)
    write_durably(code.about, json.dumps(about, indent=1))


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


@contextlib.contextmanager
def trained_from(config: RunConfig, run: RunDir) -> Iterator[RunConfig]:
    """Copy the tree (tracked, and untracked that git does not ignore), and submit from inside the copy.

    Gives the configuration whose script lies in the copy. In here the current directory and PYTHONPATH are the copy's.
    Without ``snapshot`` nothing happens.
    """
    root = root_of(place_of(config)) if config.snapshot else None
    if root is None:
        yield config
        return
    copy = make_private(run.code.tree)
    for path in _tree(root):
        target = copy / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target, follow_symlinks=False)
    before, paths = Path.cwd(), os.environ.get("PYTHONPATH")
    script = config.train.script
    inside = (
        replace(config, train=replace(config.train, script=str(_moved(Path(script), root, copy)))) if script else config
    )
    try:
        os.chdir(_moved(before, root, copy))
        mapped = [str(_moved(Path(p).absolute(), root, copy)) for p in (paths or "").split(os.pathsep) if p]
        os.environ["PYTHONPATH"] = os.pathsep.join(mapped)
        use_copy(run.code)
        yield inside
    finally:
        os.chdir(before)
        os.environ.pop("PYTHONPATH")
        if paths is not None:
            os.environ["PYTHONPATH"] = paths


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
