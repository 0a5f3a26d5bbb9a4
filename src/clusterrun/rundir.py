"""The run directory: the one owner of every path of a run. No other module spells a file name of it.

    <shared_dir>/runs/<run id>/
      config.yaml  plan.json  submission.sh     written once, at submission
      job.json                                  where it was submitted: executor, job id
      ledger.jsonl                              written by the conductor alone
      fence.json                                which attempt may write (fence.py)
      submitit/                                 submitit's pickle and the conductor's own output
      attempts/<n>/preflight/<node>.json        attempts/<n>/logs/<node>.<rank>.{out,err,nccl}
      attempts/<n>/events/<node>.<rank>.jsonl   attempts/<n>/steps/<step>.{out,err}
      checkpoints/step-00001200/                checkpoints/LATEST
      tensorboard/
      code/code.json  code/uncommitted.diff     the git commit and what differed; code/tree/ with snapshot=true
    <shared_dir>/sweeps/<sweep id>/
      sweep.yaml                                the points: run id and overrides of each
      <run id>/                                 a run directory as above, one per point
      submitit/  submissions/<job id>.sh        of its arrays; each run links to its part
      code/  code-2/                            as of a run, once for all points; each links to its own

Directories are made with mode 0700: a run holds logs, code and weights of one user.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.errors import RunError

RUNS = "runs"
SWEEPS = "sweeps"
_CODE = re.compile(r"code(-\d+)?")


def default_shared_dir() -> Path:
    """Where runs live when cluster.shared_dir is not given."""
    return Path(os.environ.get("CLUSTERRUN_SHARED_DIR") or "~/clusterrun").expanduser().absolute()


def make_private(path: Path) -> Path:
    """Make a directory with mode 0700 (parents that exist keep theirs) and return it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.mkdir(exist_ok=True, mode=0o700)
    return path


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that readers see the old or the new text, never a part, also after a crash."""
    write_all_durably([(path, text)])


def write_all_durably(files: Sequence[tuple[Path, str]]) -> None:
    """Many files in this way. The disk is asked for all of them before any gets its name, which it does at once."""
    for written in _written([(_beside(path), path, text) for path, text in files], sync=True):
        sync_directory(written.parent)


def write_whole(path: Path, text: str) -> None:
    """As ``write_durably``, but for a crash of the server: for what can be written again, of which there is much."""
    _written([(_beside(path), path, text)], sync=False)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _written(files: Sequence[tuple[Path, Path, str]], sync: bool) -> list[Path]:
    """Each text under its temporary name, then each under its own."""
    try:
        for temporary, _, text in files:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as out:
                out.write(text)
                if sync:
                    out.flush()
                    os.fsync(out.fileno())
        for temporary, path, text in files:
            try:
                os.replace(temporary, path)
            except FileNotFoundError:
                # NFS can repeat a rename that succeeded, and report the repetition's failure.
                if path.read_text(encoding="utf-8") != text:
                    raise
    except BaseException:
        for temporary, _, _ in files:
            temporary.unlink(missing_ok=True)
        raise
    return [path for _, path, _ in files]


def is_whole(path: Path) -> bool:
    """Whether a file is there, and not what a crash of the server makes of one: empty, or with zeros for text."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return bool(content) and b"\0" not in content


def sync_directory(path: Path) -> None:
    """fsync a directory, so that a name made or renamed in it survives a crash of the server."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class AttemptDir:
    """Paths of one attempt (one start of the run)."""

    root: Path
    number: int

    @property
    def preflight(self) -> Path:
        return self.root / "preflight"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def steps(self) -> Path:
        return self.root / "steps"

    def token(self, content: str) -> Path:
        """Written by the conductor for the other nodes to find: the proof that they share this directory.

        Each try has a name of its own: a node that read an older one of the same name could still see that.
        """
        return self.preflight / f".token-{content}"

    def make(self) -> None:
        make_private(self.root)
        for part in (self.preflight, self.logs, self.events, self.steps):
            make_private(part)

    def report(self, node: str) -> Path:
        return self.preflight / f"{node}.json"

    def log(self, node: str, rank: int, restart: int, stream: str) -> Path:
        """One file per rank and stream; a restart by torchrun inside the attempt gets its own."""
        suffix = f".r{restart}" if restart else ""
        return self.logs / f"{node}.{rank}{suffix}.{stream}"

    def error_file(self, node: str, rank: int, restart: int) -> Path:
        suffix = f".r{restart}" if restart else ""
        return self.logs / f"{node}.{rank}{suffix}.error.json"

    def nccl_log(self, node: str, rank: int, restart: int) -> Path:
        suffix = f".r{restart}" if restart else ""
        return self.logs / f"{node}.{rank}{suffix}.nccl"

    def nccl_logs(self) -> list[Path]:
        return sorted(self.logs.glob("*.nccl"))

    def flight_prefix(self, node: str) -> Path:
        """torch appends the rank to the name of what its flight recorder writes."""
        return self.logs / f"{node}.flight_"

    def event_file(self, node: str, rank: int) -> Path:
        return self.events / f"{node}.{rank}.jsonl"

    def profile(self, rank: int, ending: str) -> Path:
        """A profile of one rank, beside the other attempts' in the run's ``profiles``."""
        return self.profiles / f"rank{rank}.{ending}"

    @property
    def profiles(self) -> Path:
        return RunDir(self.root.parent.parent).profiles / f"attempt{self.number}"

    def step_output(self, step: str) -> tuple[Path, Path]:
        """Standard output and error of a whole step (what srun or the local twin printed)."""
        return self.steps / f"{step}.out", self.steps / f"{step}.err"

    def event_files(self, rank: int | None = None) -> list[Path]:
        """Event files of this attempt, of one rank or of all."""
        pattern = "*.jsonl" if rank is None else f"*.{rank}.jsonl"
        return sorted(self.events.glob(pattern))


@dataclass(frozen=True)
class CodeDir:
    """What code a run was submitted with."""

    root: Path

    @property
    def about(self) -> Path:
        """Commit, branch, and which files differ from it."""
        return self.root / "code.json"

    @property
    def diff(self) -> Path:
        """Against the commit, as ``git apply`` takes it."""
        return self.root / "uncommitted.diff"

    @property
    def tree(self) -> Path:
        """The copy that the run trains from (snapshot=true)."""
        return self.root / "tree"


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Making a value touches nothing; ``create`` and ``open`` do."""

    root: Path

    @classmethod
    def create(cls, shared_dir: Path, run_id: str) -> RunDir:
        """Claim a new run directory. Raises FileExistsError when another submission took the id."""
        return cls.create_in(make_private(shared_dir / RUNS), run_id)

    @classmethod
    def create_in(cls, parent: Path, run_id: str) -> RunDir:
        """The same below any directory that is there, such as a sweep's."""
        run = cls(parent / run_id)
        for part in (run.root, run.attempts, run.checkpoints, run.submitit):
            part.mkdir(mode=0o700)
        return run

    @classmethod
    def open(cls, root: Path) -> RunDir:
        """The run at ``root``. Raises RunError when it is not a run directory."""
        run = cls(root.resolve())
        if not run.config.is_file():
            raise RunError(f"{root}: not a run directory (no {run.config.name} in it)")
        return run

    @property
    def id(self) -> str:
        return self.root.name

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def submission(self) -> Path:
        return self.root / "submission.sh"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def fence(self) -> Path:
        return self.root / "fence.json"

    @property
    def submitit(self) -> Path:
        return self.root / "submitit"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def profiles(self) -> Path:
        """Traces of torch.profiler or nsys: a directory per attempt, a file per rank."""
        return self.root / "profiles"

    @property
    def code(self) -> CodeDir:
        return CodeDir(self.root / "code")

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / str(number), number)

    def all_attempts(self) -> list[AttemptDir]:
        numbers = sorted(int(p.name) for p in self.attempts.glob("*") if p.name.isdigit())
        return [self.attempt(n) for n in numbers]


@dataclass(frozen=True)
class SweepDir:
    """Paths of one sweep: the parent of the run directories of its points."""

    root: Path

    @classmethod
    def of(cls, shared_dir: Path, sweep_id: str) -> SweepDir:
        return cls(shared_dir / SWEEPS / sweep_id)

    def make(self) -> None:
        make_private(self.root.parent)
        for part in (self.root, self.submitit, self.submissions):
            make_private(part)

    @property
    def id(self) -> str:
        return self.root.name

    @property
    def sweep(self) -> Path:
        return self.root / "sweep.yaml"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def log(self) -> Path:
        """What a sweep that goes on by itself on this machine says."""
        return self.root / "sweep.log"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def submitit(self) -> Path:
        return self.root / "submitit"

    @property
    def submissions(self) -> Path:
        return self.root / "submissions"

    def codes(self) -> list[CodeDir]:
        """Which code its points were submitted with; several when it changed between submissions."""
        return [CodeDir(path) for path in sorted(self.root.glob("code*")) if _CODE.fullmatch(path.name)]

    def new_code(self) -> CodeDir:
        """The next of them, which is not there yet."""
        number = len(self.codes()) + 1
        return CodeDir(self.root / ("code" if number == 1 else f"code-{number}"))

    def run(self, run_id: str) -> RunDir:
        return RunDir(self.root / run_id)


def run_roots(shared_dir: Path) -> list[Path]:
    """Every run directory, alone or in a sweep."""
    found = [*(shared_dir / RUNS).glob("*"), *(path.parent for path in (shared_dir / SWEEPS).glob("*/*/config.yaml"))]
    return [path for path in found if path.is_dir()]


def sweep_roots(shared_dir: Path) -> list[Path]:
    """The directory of every sweep."""
    return [path.parent for path in (shared_dir / SWEEPS).glob("*/sweep.yaml")]


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a JSONL file; none when it is not there. Lines that a crash cut short are passed over."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")  # a damaged block costs the lines in it, no more
    except FileNotFoundError:
        return
    for line in text.split("\n"):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            yield record
