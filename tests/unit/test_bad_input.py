"""Wrong invocations: the designed exit code, and one line that names the field, the value and what would be right."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from clusterrun.config import frozen
from clusterrun.config.compose import compose
from clusterrun.launch.jobs import Job
from clusterrun.ledger import Ending, Ledger
from clusterrun.rundir import RunDir
from conftest import Ended

Run = Callable[..., Ended]

A100 = ("cluster=a100_nvswitch", "cluster.shared_dir=/nfs/runs")
SCRIPT = "train=script"

# what is wrong -> arguments, and the words that the message must hold
WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # verbs, flags and the shape of overrides
    "verb": (("plna",), ("'plna'", "Did you mean 'plan'", "resume")),
    "verb not first": (("cluster=lab", "plan"), ("'plan'", "key=value")),
    "empty argument": (("",), ("''", "Verbs: ", "plan, ", "resume")),
    "flag": (("--bogus",), ("--bogus", "clusterrun --help")),
    "flag of plan": (("plan", "--jsn"), ("--jsn", "--help")),
    "flag with a value it can't have": (("plan", "--json=3"), ("--json", "'3'", "clusterrun plan --help")),
    "flag of resume": (("resume", "--bogus", "x"), ("--bogus", "clusterrun resume --help")),
    "choice of a flag": (("--cfg", "everything"), ("--cfg", "'everything'", "'job'")),
    "flag without its value": (("plan", "--cfg"), ("--cfg", "expected one argument")),
    "flags that exclude each other": (("plan", "--resolve"), ("--resolve", "--cfg")),
    "config directory": (("--config-dir", "/nowhere"), ("'/nowhere'", "not found")),
    "no key=value": (("plan", "cluster.nodes"), ("'cluster.nodes'", "key=value", "quote")),
    "no key": (("plan", "=3"), ("=3", "cluster=laptop")),
    "unclosed list": (("plan", SCRIPT, "train.args=[--epochs,3"), ("'train.args=[--epochs,3'", "key=value")),
    "line break in an override": (("plan", "name=a\nb"), (r"name=a\nb", "key=value")),
    "several values": (("plan", "cluster.nodes=1,2"), ("cluster.nodes=1,2", "-m", "[1,2]")),
    "a range": (("plan", "cluster.nodes=range(1,3)"), ("cluster.nodes=range(1,3)", "--multirun")),
    # names
    "cluster": (("cluster=nosuch",), ("cluster=nosuch", "Known: a100_nvswitch", "lab")),
    "cluster, in plan": (("plan", "cluster=nosuch"), ("cluster=nosuch", "Known: a100_nvswitch")),
    "+cluster, nearly right": (("plan", "+cluster=a100_nvswich"), ("a100_nvswich", "Did you mean 'a100_nvswitch'")),
    "cluster null": (("plan", "cluster=null"), ("cluster=null", "cluster=laptop")),
    "train": (("plan", "train=ddp_liner"), ("train=ddp_liner", "Did you mean 'ddp_linear'")),
    "data": (("plan", "data=mnist"), ("data=mnist", "Known: idx, mnist5k")),
    "checkpoint": (("plan", "checkpoint=never"), ("checkpoint=never", "default, off")),
    "preflight": (("plan", "preflight=lax"), ("preflight=lax", "default, full, strict")),
    "key": (("plan", "nodes=3"), ("nodes: no such setting", "cluster", "train")),
    "nested key": (("plan", "cluster.nods=3"), ("cluster.nods", "Did you mean 'nodes'")),
    "nested key with +": (("plan", "+cluster.nods=3"), ("cluster.nods", "Did you mean 'nodes'")),
    "deeper key": (("plan", "cluster.slurm.partiton=x"), ("cluster.slurm.partiton", "Did you mean 'partition'")),
    "enum": (("plan", "cluster.interconnect.intra_node=nvswich"), ("=nvswich", "Did you mean 'nvswitch'", "pcie")),
    "enum, executor": (("plan", "cluster.executor=pbs"), ("cluster.executor=pbs", "slurm, local")),
    "enum, optimizer": (("plan", "train.optimizer=adam"), ("train.optimizer=adam", "Did you mean 'adamw'")),
    "removed key": (("plan", "~cluster.nodes"), ("cluster.nodes", "can't be removed")),
    "interpolation": (("plan", "name=${oc.env:NO_SUCH}"), ("name", "NO_SUCH")),
    # types and ranges
    "text for a number": (("plan", "cluster.nodes=two"), ("cluster.nodes=two", "whole number")),
    "fraction for a count": (("plan", "cluster.nodes=1.5"), ("cluster.nodes=1.5", "whole number")),
    "text for a rate": (("plan", "train.lr=fast"), ("train.lr=fast", "must be a number")),
    "text for a switch": (("plan", "wait=maybe"), ("wait=maybe", "true or false")),
    "number for a list": (("plan", "train.args=3"), ("train.args=3", "list", "[a,b]")),
    "number for a mapping": (("plan", "train.task_args=3"), ("train.task_args=3", "mapping")),
    "null": (("plan", "train.lr=null"), ("train.lr=null", "needs a value")),
    "zero nodes": (("plan", "cluster.nodes=0"), ("cluster.nodes=0", "from 1")),
    "negative nodes": (("cluster.nodes=-1",), ("cluster.nodes=-1", "from 1")),
    "zero epochs": (("plan", "train.epochs=0"), ("train.epochs=0", "from 1")),
    "negative rate": (("plan", "train.lr=-1"), ("train.lr=-1", "from 0")),
    "rate that is no number": (("plan", "train.lr=nan"), ("train.lr=nan", "from 0")),
    "negative seed": (("plan", "seed=-1"), ("seed=-1", "from 0")),
    "bf16 gradients with Gloo": (("plan", "train.grad_compression=bf16"), ("grad_compression=bf16", "use fp16")),
    "compression, misspelt": (("plan", "train.grad_compression=f16"), ("=f16", "none, bf16, fp16")),
    "bucket of nothing": (("plan", "train.bucket_mb=0"), ("train.bucket_mb=0", "from 0.001")),
    "buckets of a script": (("plan", SCRIPT, f"train.script={__file__}", "train.bucket_mb=9"), ("bucket_cap_mb",)),
    "clipping at zero": (("plan", "train.clip_grad_norm=0"), ("train.clip_grad_norm=0", "above 0", "null")),
    "no samples": (("plan", "data.samples=0"), ("data.samples=0", "from 1")),
    "everything held out": (("plan", "data.holdout=1"), ("data.holdout=1", "between 0 and 1")),
    "one checkpoint kept": (("plan", "checkpoint.keep=1"), ("checkpoint.keep=1", "at least 2")),
    "checkpoint every 0 steps": (("plan", "checkpoint.every_steps=0"), ("checkpoint.every_steps=0", "from 1")),
    "no time for preflight": (("plan", "preflight.timeout_s=0"), ("preflight.timeout_s=0", "from 1")),
    "no attempts": (("plan", "recovery.max_stalled_attempts=0"), ("recovery.max_stalled_attempts=0", "from 1")),
    "link rate": (("plan", "cluster.interconnect.nic_gbit_per_s=-5"), ("nic_gbit_per_s=-5", "above 0")),
    # the cluster
    "more workers than GPUs": (("plan", *A100, "cluster.nproc_per_node=9"), ("cluster.nproc_per_node=9", "at most 8")),
    "spares on a laptop": (("plan", "cluster.spare_nodes=1"), ("cluster.spare_nodes=1", "set it to 0")),
    "time limit in words": (("plan", "cluster.time_limit=abc"), ("cluster.time_limit=abc", "90m", "HH:MM:SS")),
    "time limit without unit": (("plan", "cluster.time_limit=60"), ("cluster.time_limit=60", "90m")),
    "time limit of no clock": (("plan", "cluster.time_limit=25:99:00"), ("cluster.time_limit=25:99:00", "HH:MM:SS")),
    "time limit of nothing": (("plan", "cluster.time_limit=0m"), ("cluster.time_limit=0m", "at least one minute")),
    "time limit of an age": (("plan", "cluster.time_limit=9999d"), ("cluster.time_limit=9999d", "at most 366d")),
    "environment name": (("plan", "cluster.env={A-B: x}"), ("cluster.env.A-B", "environment variable")),
    "node-local directory": (("plan", *A100, "cluster.shared_dir=/tmp"), ("cluster.shared_dir=/tmp", "shared storage")),
    "node-local by a detour": (
        ("plan", *A100, "cluster.shared_dir=/nfs/../tmp/x"),
        ("/nfs/../tmp/x", "shared storage"),
    ),
    # Slurm
    "two kinds of memory": (
        ("plan", *A100, "cluster.slurm.mem=1G", "cluster.slurm.mem_per_cpu=1G"),
        ("cluster.slurm.mem and cluster.slurm.mem_per_cpu", "only one"),
    ),
    "memory size": (("plan", *A100, "cluster.slurm.mem=lots"), ("cluster.slurm.mem=lots", "200G")),
    "option of clusterrun's": (("plan", *A100, "cluster.slurm.extra.time=10"), ("extra.time", "cluster.time_limit")),
    "the same with _": (
        ("plan", *A100, "cluster.slurm.extra.ntasks_per_node=2"),
        ("extra.ntasks_per_node", "cluster.nproc_per_node"),
    ),
    "option with a setting": (
        ("plan", *A100, "cluster.slurm.extra.mem_per_cpu=1G", "cluster.slurm.mem=1G"),
        ("extra.mem_per_cpu", "use cluster.slurm.mem_per_cpu"),
    ),
    "short option": (("plan", *A100, "cluster.slurm.extra.N=2"), ("cluster.slurm.extra.N", "long name")),
    "list for an option": (
        ("plan", *A100, "cluster.slurm.extra.switches=[1,2]"),
        ("extra.switches=[1, 2]", "one text"),
    ),
    "line break in a value": (("plan", *A100, 'cluster.slurm.partition="a\nb"'), (r"'a\nb'", "line break")),
    "line break in setup": (("plan", *A100, 'cluster.slurm.setup=["a\nb"]'), ("cluster.slurm.setup[0]", "line break")),
    "line break in an option": (
        ("plan", *A100, 'cluster.slurm.extra.switches="1\n#SBATCH --uid=0"'),
        ("cluster.slurm.extra.switches", "line break"),
    ),
    "blank in a partition": (("plan", *A100, 'cluster.slurm.partition="a b"'), ("'a b'", "null to leave it out")),
    # task, script and data
    "task": (("plan", "train.task=liner"), ("train.task=liner", "Did you mean 'linear'", "package.module:Class")),
    "task of no class": (("plan", "train.task=my_module:"), ("train.task=my_module:", "package.module:Class")),
    "argument of a task": (
        ("plan", "train=ddp_mlp", "train.task_args.hiden=3"),
        ("train.task_args.hiden", "Did you mean 'hidden'"),
    ),
    "type of an argument": (
        ("plan", "train=ddp_mlp", "train.task_args.hidden=wide"),
        ("train.task_args.hidden='wide'", "whole number"),
    ),
    "arguments that clash": (("plan", "train=gpt", "train.task_args.width=130"), ("width=130", "heads=4")),
    "arguments for a task": (("plan", "train.args=[--x]"), ("train.args=['--x']", "train.task_args")),
    "script missing": (("plan", SCRIPT), ("train.script", "train.script=my.py")),
    "script not there": (("plan", SCRIPT, "train.script=my.py"), ("/work/my.py", "no such file")),
    "script is a directory": (("plan", SCRIPT, "train.script=/"), ("train.script=/:", "no such file")),
    "task and script": (("plan", "train.script=/my.py"), ("train.task=linear", "train.script=/my.py", "give one")),
    "idx without a path": (("plan", "data=idx"), ("data.path", "data=idx", "directory")),
    "idx with a bad path": (("plan", "data=idx", "data.path=/no/such"), ("data.path=/no/such", "no such directory")),
    "text without a path": (("plan", "train=gpt", "data=text"), ("data.path", "data=text", "file")),
    "text from a directory": (("plan", "train=gpt", "data=text", "data.path=/"), ("data.path=/:", "no such file")),
    "data a task can't take": (("plan", "train=gpt", "data=mnist5k"), ("data=mnist5k", "train.task=gpt", "text")),
    "no batch size": (("plan", "train.batch_per_rank=null"), ("batch_per_rank", "global_batch", "exactly one")),
    "both batch sizes": (("plan", "train.global_batch=64"), ("16 and 64", "set the other to null")),
    "indivisible batch": (
        ("plan", "train.batch_per_rank=null", "train.global_batch=63"),
        ("train.global_batch=63", "world size 4", "is: 64"),
    ),
    "indivisible micro-batch": (
        ("plan", "train.batch_per_rank=16", "train.accumulate=3"),
        ("train.batch_per_rank=16", "train.accumulate=3", "is: 15"),
    ),
    # the run
    "run id": (("plan", "run_id=../x"), ("run_id=../x", "letters, digits")),
    "name": (("plan", "name=a b"), ("name=a b", "letters, digits")),
    "resume nothing": (("resume",), ("RUN", "required", "clusterrun resume --help")),
    "resume two": (("resume", "a", "b"), ("unrecognized arguments: b", "--help")),
    "resume unknown": (("resume", "nosuch"), ("nosuch: no such run", "shared/runs")),
    "resume a directory": (("resume", "/nowhere"), ("/nowhere", "not a run directory")),
    # sweeps
    "sweep over a wrong name": (("-m", "cluster=nosuch"), ("cluster=nosuch", "Known:")),
    "sweep with a wrong type": (("plan", "-m", "cluster.nodes=1,two"), ("cluster.nodes=two", "whole number")),
    "sweep with a wrong key": (("-m", "cluster.nodes=1,2", "foo=3"), ("foo: no such setting",)),
}


def assert_one_clear_line(ended: Ended, *words: str, code: int = 2) -> None:
    assert ended.code == code, ended
    assert ended.stdout == ""
    assert ended.stderr.startswith("clusterrun: ")
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert ended.stderr.endswith("\n")
    assert "Traceback" not in ended.stderr
    for word in words:
        assert word in ended.stderr


@pytest.mark.parametrize("what", WRONG)
def test_wrong(what: str, clusterrun_here: Run, place: Path) -> None:
    arguments, words = WRONG[what]
    assert_one_clear_line(clusterrun_here(*arguments), *words)
    assert not list((place / "shared").iterdir())
    assert not list((place / "work").iterdir())


@pytest.mark.parametrize(
    "what", ["verb", "flag", "cluster", "null", "unclosed list", "sweep with a wrong type", "resume nothing"]
)
def test_wrong_in_a_process_of_its_own(what: str, clusterrun_cli: Run) -> None:
    arguments, words = WRONG[what]
    assert_one_clear_line(clusterrun_cli(*arguments), *words)


def test_bytes_that_are_no_text(clusterrun_cli: Run) -> None:
    assert_one_clear_line(clusterrun_cli("plan", "data=idx", os.fsdecode(b"data.path=\xff")), r"data.path=\udcff")


def test_a_sweep_reports_each_wrong_point(clusterrun_here: Run) -> None:
    ended = clusterrun_here("plan", "-m", "cluster.nodes=1,0,-2")
    assert ended.code == 2
    assert [line.split(":")[1] for line in ended.stderr.splitlines()] == [" cluster.nodes=0", " cluster.nodes=-2"]
    assert "1 x 2" in ended.stdout  # of the point that is right


def test_shared_dir_with_a_file_in_the_way(clusterrun_here: Run, place: Path) -> None:
    file = place / "file"
    file.touch()
    for wrong in (file, file / "below"):
        ended = clusterrun_here(f"cluster.shared_dir={wrong}")
        assert_one_clear_line(ended, f"cluster.shared_dir={wrong}", "not a directory", "CLUSTERRUN_SHARED_DIR")
    (place / "shared" / "runs").touch()
    assert_one_clear_line(clusterrun_here(), f"{place}/shared/runs is not a directory")


def test_shared_dir_that_takes_no_directory(clusterrun_here: Run) -> None:
    ended = clusterrun_here("cluster.shared_dir=/proc/clusterrun")
    assert_one_clear_line(ended, "cluster.shared_dir=/proc/clusterrun", "CLUSTERRUN_SHARED_DIR")


def test_no_slurm_here(clusterrun_here: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place / "work"))
    assert_one_clear_line(clusterrun_here("cluster=lab"), "sbatch: command not found", "login node", "cluster=laptop")
    assert not list((place / "shared" / "runs").iterdir())  # a run that was never submitted does not take its id


def test_sbatch_refuses(clusterrun_here: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's own words, without a Slurm: only its answer counts here. The real one is asked in tests/slurm."""
    sbatch = place / "home" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    assert_one_clear_line(clusterrun_here("cluster=lab", "run_id=mine"), "invalid partition specified: gpu")
    assert not (place / "shared" / "runs" / "mine").exists()


def test_a_run_does_not_submit_another(clusterrun_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERRUN_NODE", "c1")
    assert_one_clear_line(clusterrun_here("cluster=lab"), "cluster.executor=slurm", "part of a run")


class TestUserFiles:
    """Configs of a user's own, with mistakes in them."""

    WRONG: ClassVar[dict[str, tuple[bytes, tuple[str, ...]]]] = {
        "unknown key": (b"name: mine\npartition: gpu\n", ("cluster.partition: no such setting",)),
        "syntax": (b"name: [mine\nnodes: 2\n", ("mine.yaml, line 2", "correct the YAML")),
        "tab": (b"slurm:\n\tpartition: x\n", ("mine.yaml, line 2", "correct the YAML")),
        "the same key twice": (b"nodes: 1\nnodes: 2\n", ("mine.yaml, line 2", "duplicate key nodes")),
        "no UTF-8": (b"name: m\xff\n", ("mine.yaml", "UTF-8")),
        "list": (b"- nodes\n", ("cluster/mine.yaml", "must be a mapping")),
        "type": (b"nodes: many\n", ("cluster.nodes", "cluster/mine.yaml", "many", "whole number")),
        "text for a list": (b"slurm: {setup: module load x}\n", ("cluster.slurm.setup", "must be a list")),
        "unquoted clock": (b"time_limit: 24:00:00\n", ("cluster.time_limit=86400", "in quotes in YAML")),
        "control character": (b'name: "a\\0b"\n', ("cluster.name=", "control character")),
        "base that is not there": (b"defaults: [nosuch]\n", ("cluster=nosuch", "no such config")),
        "name": (b"name: my cluster\n", ("cluster.name=my cluster", "letters, digits")),
    }

    @pytest.mark.parametrize("what", WRONG)
    def test_mistake(self, what: str, clusterrun_here: Run, place: Path) -> None:
        text, words = self.WRONG[what]
        group = place / "work" / "conf" / "cluster"
        group.mkdir(parents=True)
        (group / "mine.yaml").write_bytes(text)
        assert_one_clear_line(clusterrun_here("plan", "cluster=mine"), *words)

    def test_nul_in_an_argument(self, clusterrun_here: Run, place: Path) -> None:
        group = place / "work" / "conf" / "train"
        group.mkdir(parents=True)
        (group / "mine.yaml").write_text('task: null\nscript: my.py\nargs: ["a\\0b"]\n')
        (place / "work" / "my.py").touch()
        assert_one_clear_line(clusterrun_here("plan", "train=mine"), "train.args", "NUL")

    def test_the_message_says_where_it_looked(self, clusterrun_here: Run, place: Path) -> None:
        (place / "work" / "conf").mkdir()
        assert_one_clear_line(clusterrun_here("plan", "cluster=mine"), f"looked in {place}/work/conf, the packaged")


class TestResume:
    """Runs that can't go on."""

    @staticmethod
    def make(place: Path, run_id: str) -> RunDir:
        run = RunDir.create(place / "shared", run_id)
        run.config.write_text(frozen.to_yaml(compose([f"cluster.shared_dir={place / 'shared'}"])))
        return run

    def test_ambiguous(self, clusterrun_here: Run, place: Path) -> None:
        self.make(place, "linear-1")
        self.make(place, "linear-2")
        assert_one_clear_line(clusterrun_here("resume", "linear"), "linear: several runs", "linear-1", "linear-2")

    @pytest.mark.parametrize("pattern", ["*", "?", "[r]"])
    def test_a_pattern_is_no_name(self, pattern: str, clusterrun_here: Run, place: Path) -> None:
        self.make(place, "r")
        assert_one_clear_line(clusterrun_here("resume", pattern), f"{pattern}: no such run in {place}/shared/runs")

    def test_finished(self, clusterrun_here: Run, place: Path) -> None:
        ledger = Ledger(self.make(place, "r").ledger)
        ledger.end(ledger.start(reason="", job_id="1", saved_before=None), Ending.done, saved_after=9, exit_code=0)
        assert_one_clear_line(clusterrun_here("resume", "r"), "r: is done")

    def test_taken_id(self, clusterrun_here: Run, place: Path) -> None:
        self.make(place, "r")
        for verb in ((), ("plan",)):
            ended = clusterrun_here(*verb, "run_id=r")
            assert_one_clear_line(ended, "run_id=r", "exists", "clusterrun resume r")

    def test_slurm_does_not_answer(self, clusterrun_here: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = self.make(place, "r")
        Job("slurm", "1", str(run.root), run.id, "", 0.0).write(run)
        monkeypatch.setenv("PATH", str(place / "work"))
        assert_one_clear_line(clusterrun_here("resume", "r"), "r: can't tell whether it still lives", "squeue")

    @pytest.mark.parametrize("text", ["", "seed: [", "- 1\n", "seed: many\n", "nosuch: 3\n", "just text"])
    def test_damaged_configuration(self, text: str, clusterrun_here: Run, place: Path) -> None:
        run = self.make(place, "r")
        run.config.write_text(text)
        assert_one_clear_line(clusterrun_here("resume", "r"), str(run.config), "can't be read")

    def test_damaged_job(self, clusterrun_here: Run, place: Path) -> None:
        run = self.make(place, "r")
        run.job.write_text(json.dumps({"executor": "slurm"})[:-3])
        assert_one_clear_line(clusterrun_here("resume", "r"), str(run.job), "can't be read")

    def test_empty_directory(self, clusterrun_here: Run, place: Path) -> None:
        assert_one_clear_line(
            clusterrun_here("resume", str(place / "work")), str(place / "work"), "not a run directory"
        )
