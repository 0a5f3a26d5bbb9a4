"""The rules of the house that a program can check."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "clusterrun"
FILES = sorted(SOURCE.rglob("*.py"))
OWNED_NAMES = ("config.yaml", "plan.json", "submission.sh", "job.json", "ledger.jsonl", "LATEST", "checkpoints")

IMPORT_ALL = """
import importlib, json, os, signal, sys, threading

reads = []
getitem = os._Environ.__getitem__

def watched(self, key):
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in ("os", "_collections_abc"):
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").startswith("clusterrun"):
        reads.append(f"{frame.f_globals['__name__']}: {key}")
    return getitem(self, key)

def state():
    return {
        "threads": [t.name for t in threading.enumerate()],
        "files": sorted(os.listdir(".")),
        "environment": dict(os.environ),
        "signals": {n.name: str(signal.getsignal(n)) for n in signal.valid_signals() if isinstance(n, signal.Signals)},
        "directory": os.getcwd(),
        "argv": sys.argv[:1],
    }

for name in json.loads(sys.argv[1])["warm"]:  # what others do at their import is their business
    importlib.import_module(name)
os._Environ.__getitem__ = watched
before = state()
changed = []
for name in json.loads(sys.argv[1])["modules"]:
    importlib.import_module(name)
    after = state()
    changed += [f"{name}: {key} {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]
    before = after
os._Environ.__getitem__ = getitem
open(sys.argv[2], "w").write(json.dumps({"changed": changed, "reads": reads}))
"""


def _module(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.timeout(120)
def test_importing_does_nothing(tmp_path: Path) -> None:
    """No output, thread, file, signal handler, and no look at the environment, by any module of ours."""
    work, result = tmp_path / "work", tmp_path / "result.json"
    work.mkdir()
    asked = {
        "modules": [_module(file) for file in FILES],
        "warm": ["torch.distributed.run", "hydra", "submitit", "rich.console"],
    }
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps(asked), result],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads(result.read_text()) == {"changed": [], "reads": []}


@pytest.mark.parametrize("file", FILES, ids=_module)
def test_every_module_says_what_it_is(file: Path) -> None:
    assert (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").strip()


def test_imports_go_downward() -> None:
    """The contracts of pyproject.toml: layers, and no torch before the workers."""
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_every_package_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert {_module(file) for file in FILES if file.name == "__init__.py"} | {"clusterrun.conf"} == set(listed)


def _calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _strings(tree: ast.AST) -> set[str]:
    """String constants, without docstrings."""
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose]
    return {node.value for node in constants if isinstance(node.value, str)}


def test_one_door_to_subprocesses() -> None:
    doors = {
        "subprocess.run",
        "subprocess.Popen",
        "subprocess.call",
        "subprocess.check_call",
        "subprocess.check_output",
    }
    doors |= {"os.system", "os.popen", "os.posix_spawn", "Popen", "pty.spawn"}
    found = {_module(file): _calls(ast.parse(file.read_text())) & doors for file in FILES}
    assert {module for module, used in found.items() if used} == {"clusterrun.process"}
    assert "shell=True" not in "".join(file.read_text() for file in FILES)


def test_one_owner_of_every_path() -> None:
    """No module but the run directory and the checkpoint store spells a file name of theirs."""
    owners = {"clusterrun.rundir", "clusterrun.checkpoint.store", "clusterrun.checkpoint.manifest"}
    found = {_module(file): _strings(ast.parse(file.read_text())) & set(OWNED_NAMES) for file in FILES}
    verb = {"clusterrun.cli.checkpoints": {"checkpoints"}, "clusterrun.cli.verbs": {"checkpoints"}}  # not the directory
    others = {module: names - verb.get(module, set()) for module, names in found.items() if module not in owners}
    assert {module: names for module, names in others.items() if names} == {}
    assert found["clusterrun.rundir"] >= set(OWNED_NAMES) - {"LATEST"}
