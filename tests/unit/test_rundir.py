"""The run directory: its paths, its permissions, and files that are whole whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.errors import RunError
from clusterrun.rundir import RUNS, RunDir, default_shared_dir, make_private, read_json_lines, write_durably


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "r1")


def test_create(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        run = RunDir.create(tmp_path / "new" / "shared", "r1")
    finally:
        os.umask(old)
    assert run.root == tmp_path / "new" / "shared" / RUNS / "r1"
    assert run.id == "r1"
    for directory in (run.root.parent, run.root, run.attempts, run.checkpoints, run.submitit):
        assert _mode(directory) == 0o700
    assert {p.name for p in run.root.iterdir()} == {"attempts", "checkpoints", "submitit"}


def test_an_id_is_taken_once(tmp_path: Path, run: RunDir) -> None:
    with pytest.raises(FileExistsError):
        RunDir.create(tmp_path, "r1")
    assert RunDir.create(tmp_path, "r2").root != run.root


def test_open(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"r1: not a run directory \(no config.yaml"):
        RunDir.open(run.root)
    run.config.touch()
    assert RunDir.open(run.root) == run
    link = tmp_path / "link"
    link.symlink_to(run.root)
    assert RunDir.open(link) == run


def test_making_a_value_touches_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "none")
    attempt = run.attempt(3)
    assert attempt.log("c1", 4, 0, "out") == tmp_path / "none" / "attempts" / "3" / "logs" / "c1.4.out"
    assert attempt.log("c1", 4, 2, "err").name == "c1.4.r2.err"
    assert attempt.error_file("c1", 4, 0).name == "c1.4.error.json"
    assert attempt.error_file("c1", 4, 1).name == "c1.4.r1.error.json"
    assert attempt.report("c1").name == "c1.json"
    assert [p.name for p in attempt.step_output("training")] == ["training.out", "training.err"]
    assert not list(tmp_path.iterdir())


def test_attempts_in_the_order_of_their_numbers(run: RunDir) -> None:
    for number in (10, 9, 1, 2):
        run.attempt(number).make()
    (run.attempts / "notes").mkdir()
    assert [attempt.number for attempt in run.all_attempts()] == [1, 2, 9, 10]
    assert all(_mode(path) == 0o700 for path in run.attempts.rglob("*") if path.name != "notes")
    run.attempt(9).make()  # again, as after a kill in the middle of it


def test_event_files_of_one_rank_or_all(run: RunDir) -> None:
    attempt = run.attempt(1)
    attempt.make()
    for node, rank in (("c2", 1), ("c1.example.org", 11), ("c1.example.org", 0)):
        attempt.event_file(node, rank).touch()
    assert [p.name for p in attempt.event_files(1)] == ["c2.1.jsonl"]
    assert [p.name for p in attempt.event_files(0)] == ["c1.example.org.0.jsonl"]
    assert len(attempt.event_files()) == 3


def test_no_path_is_used_twice(run: RunDir) -> None:
    files = [run.config, run.plan, run.submission, run.job, run.ledger]
    directories = [run.submitit, run.checkpoints, run.tensorboard, run.attempts]
    attempt = run.attempt(1)
    inside = [attempt.preflight, attempt.logs, attempt.events, attempt.steps, *attempt.step_output("preflight")]
    every = [*files, *directories, *inside]
    assert len(set(every)) == len(every)
    assert all(path.is_relative_to(run.root) for path in every)


def test_make_private_leaves_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    make_private(tmp_path / "open")
    assert _mode(tmp_path / "open") == 0o755


class TestWriteDurably:
    def test_old_or_new(self, tmp_path: Path) -> None:
        file = tmp_path / "f"
        for text in ("old", "new é", ""):
            write_durably(file, text)
            assert file.read_text(encoding="utf-8") == text
        assert _mode(file) == 0o600
        assert [p.name for p in tmp_path.iterdir()] == ["f"]

    def test_a_text_that_can_not_be_written_leaves_the_old(self, tmp_path: Path) -> None:
        write_durably(tmp_path / "f", "old")
        with pytest.raises(UnicodeEncodeError):
            write_durably(tmp_path / "f", "\udcff")
        assert (tmp_path / "f").read_text() == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["f"]

    def test_a_reader_never_sees_a_part(self, tmp_path: Path) -> None:
        """A writer is killed in the middle again and again; the file is always one whole text."""
        file = tmp_path / "f"
        write_durably(file, "0" * 200_000)
        program = (
            "import pathlib, sys\nfrom clusterrun.rundir import write_durably\nprint('go', flush=True)\n"
            "while True:\n    for digit in '0123456789':\n"
            "        write_durably(pathlib.Path(sys.argv[1]), digit * 200_000)\n"
        )
        for _ in range(3):
            with subprocess.Popen([sys.executable, "-c", program, file], stdout=subprocess.PIPE) as writer:
                assert writer.stdout
                writer.stdout.readline()
                for _ in range(60):
                    text = file.read_text()
                    assert text == text[:1] * 200_000
                writer.kill()
            text = file.read_text()
            assert text == text[:1] * 200_000


def test_a_rename_that_nfs_repeats_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try was done and its answer lost; the client sends it again and reports that the source is gone."""
    replace = os.replace

    def twice(source: Path, target: Path) -> None:
        replace(source, target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", twice)
    write_durably(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "new"

    def lost(source: Path, target: Path) -> None:
        os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", lost)
    with pytest.raises(FileNotFoundError):
        write_durably(tmp_path / "f", "newer")
    assert (tmp_path / "f").read_text() == "new"


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    assert list(read_json_lines(file)) == []
    file.write_text('{"a": 1}\n\n[2]\n3\n{"b": \n\x00\x00\n{"line": "\u2028 is no line end"}\n{"cut": ')
    assert list(read_json_lines(file)) == [{"a": 1}, {"line": "\u2028 is no line end"}]


def test_default_shared_dir(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_shared_dir() == place / "shared"
    monkeypatch.setenv("CLUSTERRUN_SHARED_DIR", "~/runs")
    assert default_shared_dir() == place / "home" / "runs"
    monkeypatch.setenv("CLUSTERRUN_SHARED_DIR", "below")
    assert default_shared_dir() == place / "work" / "below"
    monkeypatch.setenv("CLUSTERRUN_SHARED_DIR", "")
    assert default_shared_dir() == place / "home" / "clusterrun"
