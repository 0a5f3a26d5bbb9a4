"""The plan: what is printed, what it depends on, and what it does not touch."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.compose import compose
from clusterrun.config.grace import signal_lead_s
from clusterrun.config.schema import ClusterConfig, RunConfig
from clusterrun.launch.plan import Plan, base_run_id, make_plan
from clusterrun.rundir import RUNS
from conftest import Ended

Run = Callable[..., Ended]

GOLDEN = Path(__file__).parents[1] / "golden"
SHARED = "/nfs/clusterrun"  # a plan makes nothing, so it need not exist

SITE = [
    "cluster.slurm.partition=gpu",
    "cluster.slurm.account=proj-42",
    "cluster.slurm.qos=long",
    "cluster.slurm.constraint='a100&ib'",
    "cluster.slurm.reservation=maint",
    "cluster.slurm.exclude='n[3,7-9]'",
    "cluster.slurm.nodelist='n[1-2]'",
    "cluster.slurm.mem=200G",
    "cluster.slurm.gpu_request=gres",
    "cluster.slurm.gpu_type=a100",
    "cluster.slurm.exclusive=true",
    "cluster.slurm.dependency='afterok:17'",
    "cluster.slurm.licenses='matlab:1'",
    "cluster.slurm.comment='costs $5 a day'",
    "cluster.slurm.wckey=key",
    "cluster.slurm.mail_type='END,FAIL'",
    "cluster.slurm.mail_user=me@example.org",
    "cluster.slurm.setup=['module load cuda','export NCCL_DEBUG=INFO']",
    "cluster.slurm.extra={switches: '1@00:10:00', overcommit: true, contiguous: false, thread-spec: 2}",
    "cluster.interconnect.interface=ib0",
    "cluster.time_limit='1-02:00:00'",
    "cluster.spare_nodes=1",
    "cluster.env={NCCL_IB_HCA: 'mlx5_0,mlx5_1'}",
    "recovery.requeue=false",
]
PLANS: dict[str, list[str]] = {
    "a100_nvswitch": ["+cluster=a100_nvswitch", "train=ddp_linear"],
    "h100_nvswitch_ib": ["cluster=h100_nvswitch_ib", "train=gpt", "train.accumulate=2", "cluster.nodes=16"],
    "lab": ["cluster=lab", "train=ddp_mlp", "data=mnist5k"],
    "a100_pcie_site": ["cluster=a100_pcie", *SITE],
}


@pytest.fixture
def shared(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERRUN_SHARED_DIR", SHARED)
    return place


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str, clusterrun_here: Run, shared: Path) -> None:
    """The whole text. UPDATE_GOLDEN=1 writes the files anew; read the difference before you keep it."""
    ended = clusterrun_here("plan", *PLANS[name])
    assert ended.code == 0, ended.stderr
    run_id = re.search(r"^run +(\S+)$", ended.stdout, flags=re.MULTILINE)
    assert run_id
    text = ended.stdout.replace(run_id.group(1), "<run id>").replace(sys.executable, "<python>")
    file = GOLDEN / f"plan_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_json_is_the_whole_plan(clusterrun_here: Run, shared: Path) -> None:
    ended = clusterrun_here("plan", "cluster=h100_nvswitch_ib", "cluster.spare_nodes=1", "--json")
    plan = json.loads(ended.stdout)
    assert plan.keys() == {f.name for f in dataclasses.fields(Plan)}
    assert plan["resources"] == {
        "nodes": 2,
        "spare_nodes": 1,
        "nproc_per_node": 8,
        "world_size": 16,
        "gpus_per_node": 8,
        "cpus_per_node": 96,
        "time_limit_min": 1440,
        "signal_lead_s": 120,
    }
    assert plan["batch"] == {"global_": 256, "per_rank": 16, "micro": 16}
    assert plan["run_dir"] == f"{SHARED}/{RUNS}/{plan['run_id']}"
    assert plan["training_argv"][0] == "srun"
    text = clusterrun_here("plan", "cluster=h100_nvswitch_ib", "cluster.spare_nodes=1").stdout
    assert plan["sbatch"].rstrip() in text
    assert plan["run_id"] in text


def test_a_laptop_needs_no_sbatch(clusterrun_here: Run, shared: Path) -> None:
    plan = json.loads(clusterrun_here("plan", "--json").stdout)
    assert plan["sbatch"] is None
    assert plan["cluster"] == "laptop"
    assert plan["training_argv"][0] == sys.executable


class TestRunId:
    def test_same_configuration_same_id(self, shared: Path) -> None:
        assert base_run_id(compose(["cluster=lab", "seed=1"])) == base_run_id(compose(["seed=1", "+cluster=lab"]))

    @pytest.mark.parametrize("change", ["seed=1", "train.lr=0.2", "cluster=lab", "cluster.env.A=b", "preflight=strict"])
    def test_another_configuration_another_id(self, change: str, shared: Path) -> None:
        ids = {base_run_id(compose([])), base_run_id(compose([change]))}
        assert len({run_id.rpartition("-")[2] for run_id in ids}) == 2

    @pytest.mark.parametrize("change", ["wait=true", "wait=false", "run_id=mine"])
    def test_what_changes_nothing_computed(self, change: str, shared: Path) -> None:
        changed = dataclasses.replace(compose([change]), run_id=None)
        assert base_run_id(changed) == base_run_id(compose([]))

    def test_given(self, shared: Path) -> None:
        assert make_plan(compose(["run_id=mine"])).run_id == "mine"
        assert make_plan(compose(["name=mine"])).run_id.startswith("mine-")

    def test_taken(self, clusterrun_here: Run, place: Path) -> None:
        def planned() -> str:
            return str(json.loads(clusterrun_here("plan", "--json").stdout)["run_id"])

        first = planned()
        for expected in (f"{first}-2", f"{first}-3"):
            (place / "shared" / RUNS / planned()).mkdir(parents=True)
            assert planned() == expected


@pytest.mark.parametrize(
    ("limit", "lead", "expected"),
    [
        ("1m", 120, 15),
        ("2m", 120, 30),
        ("8m", 120, 120),
        ("24h", 120, 120),
        ("1h", 1800, 900),
        ("1h", 60, 60),
        (None, 120, 120),
    ],
)
def test_signal_lead(limit: str | None, lead: int, expected: int, shared: Path) -> None:
    config = compose([f"cluster.time_limit={limit or 'null'}", f"cluster.signal_lead_s={lead}", "cluster=lab"])
    plan = make_plan(config)
    assert plan.resources.signal_lead_s == expected
    assert f"#SBATCH --signal=B:USR2@{expected}\n" in (plan.sbatch or "")


@given(st.integers(1, 10**5), st.integers(1, 86_400))
def test_signal_lead_leaves_time_to_train(minutes: int, lead: int) -> None:
    config = RunConfig(cluster=ClusterConfig(time_limit=f"{minutes}m", signal_lead_s=lead))
    assert 1 <= signal_lead_s(config) <= min(lead, 15 * minutes)


def test_plan_needs_no_slurm(clusterrun_cli: Run, shared: Path) -> None:
    ended = clusterrun_cli("plan", "cluster=a100_nvswitch", env={"PATH": str(shared / "home")})
    assert ended.code == 0, ended.stderr
    assert "#SBATCH --gpus-per-node=8\n" in ended.stdout
    assert ended.stderr == ""


def test_no_torch_before_the_workers(place: Path) -> None:
    """Compose, plan, render and all that a submission and the conductor import."""
    program = """
import sys
from clusterrun.config.compose import compose, run_hydra_app, to_run_config
from clusterrun.operate.api import plan as plan_next
from clusterrun.report.plan_view import plan_text
import clusterrun.cli, clusterrun.launch.submit, clusterrun.launch.conductor, clusterrun.report.follow
import clusterrun.preflight.probe
for arguments in (["cluster=lab"], ["cluster=a100_nvswitch", "cluster.shared_dir=/nfs/x", "train=gpt"]):
    assert "sbatch script" in plan_text(plan_next(compose(arguments)).as_json(), bold=True)
run_hydra_app(["-m", "seed=1,2", "hydra.sweep.dir=."], lambda config: plan_next(to_run_config(config)) and None)
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "matplotlib")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stdout + done.stderr


def test_plus_or_not_in_front_of_a_group(clusterrun_here: Run, shared: Path) -> None:
    groups = {"cluster": "lab", "train": "ddp_mlp", "data": "mnist5k", "checkpoint": "off", "preflight": "strict"}
    for group, option in groups.items():
        plain, plus = (clusterrun_here("plan", f"{sign}{group}={option}") for sign in ("", "+"))
        assert plain.code == 0, plain.stderr
        assert plain.stdout == plus.stdout
    assert "laptop" in clusterrun_here("plan").stdout


class TestUserConfigs:
    """./conf, CLUSTERRUN_CONFIG_PATH and ~/.config/clusterrun add to and shadow the packaged configs."""

    @staticmethod
    def write(directory: Path, file: str, **settings: Any) -> None:
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(settings))

    def test_a_new_cluster_is_one_file(self, clusterrun_here: Run, shared: Path) -> None:
        gpus = {"executor": "slurm", "nodes": 3, "gpus_per_node": 4, "nproc_per_node": 4, "accelerator": "cuda"}
        self.write(shared / "work" / "conf", "cluster/mine.yaml", name="mine", slurm={"partition": "gpu"}, **gpus)
        plan = json.loads(clusterrun_here("plan", "cluster=mine", "--json").stdout)
        assert plan["run_id"].startswith("ddp_linear-mine-")
        assert plan["resources"]["world_size"] == 12
        assert "#SBATCH --partition=gpu\n" in plan["sbatch"]

    def test_a_cluster_that_builds_on_a_packaged_one(self, clusterrun_here: Run, shared: Path) -> None:
        base = {"defaults": ["a100_nvswitch", "_self_"], "name": "ours"}
        self.write(shared / "work" / "conf", "cluster/ours.yaml", **base, slurm={"account": "p1"})
        plan = json.loads(clusterrun_here("plan", "cluster=ours", "--json").stdout)
        assert plan["resources"]["gpus_per_node"] == 8
        assert "#SBATCH --account=p1\n" in plan["sbatch"]

    def test_shadowing(self, clusterrun_here: Run, shared: Path) -> None:
        self.write(shared / "work" / "conf", "train/ddp_linear.yaml", name="own", task="linear", batch_per_rank=3)
        plan = json.loads(clusterrun_here("plan", "--json").stdout)
        assert plan["batch"]["per_rank"] == 3

    def test_the_nearest_wins(self, clusterrun_here: Run, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        home, first, second = shared / "home" / ".config" / "clusterrun", shared / "1", shared / "2"
        here = shared / "work" / "conf"

        def name() -> str:
            with_hydra = clusterrun_here("cluster=mine", "--cfg", "job").stdout
            planned = json.loads(clusterrun_here("plan", "cluster=mine", "--json").stdout)["cluster"]
            assert yaml.safe_load(with_hydra)["cluster"]["name"] == planned
            return str(planned)

        self.write(home, "cluster/mine.yaml", name="home")
        assert name() == "home"
        self.write(second, "cluster/mine.yaml", name="second")
        monkeypatch.setenv("CLUSTERRUN_CONFIG_PATH", f"{first}:{second}")
        assert name() == "second"
        self.write(first, "cluster/mine.yaml", name="first")
        assert name() == "first"
        self.write(here, "cluster/mine.yaml", name="here")
        assert name() == "here"

    def test_a_config_of_another_program_is_left_alone(self, clusterrun_here: Run, shared: Path) -> None:
        self.write(shared / "work" / "conf", "config.yaml", nonsense=True)
        assert clusterrun_here("plan").code == 0


class TestHydrasOwn:
    """What Hydra's command line gives, and that it leaves nothing behind."""

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self, place: Path) -> Any:
        yield
        assert not [*(place / "work").iterdir(), *(place / "shared").iterdir()]

    def test_cfg_job(self, clusterrun_cli: Run) -> None:
        ended = clusterrun_cli("cluster=lab", "seed=7", "--cfg", "job")
        config = yaml.safe_load(ended.stdout)
        assert (ended.code, config["seed"], config["cluster"]["name"]) == (0, 7, "lab")
        assert config.keys() == {f.name for f in dataclasses.fields(RunConfig)}

    def test_help(self, clusterrun_cli: Run) -> None:
        ended = clusterrun_cli("--help")
        assert ended.code == 0
        for word in ("clusterrun plan", "a100_nvswitch", "nproc_per_node", "CLUSTERRUN_CONFIG_PATH", "--multirun"):
            assert word in ended.stdout

    @pytest.mark.parametrize("verb", ["plan", "resume"])
    def test_help_of_a_verb(self, verb: str, clusterrun_here: Run) -> None:
        ended = clusterrun_here(verb, "--help")
        assert (ended.code, ended.stderr) == (0, "")
        assert ended.stdout.startswith(f"usage: clusterrun {verb}")
        assert "example: clusterrun" in ended.stdout

    def test_version(self, clusterrun_cli: Run) -> None:
        assert re.fullmatch(r"clusterrun \d+\.\d+\.\d+\n", clusterrun_cli("--version").stdout)

    @pytest.mark.parametrize("flag", ["-m", "--multirun"])
    def test_multirun(self, flag: str, clusterrun_cli: Run) -> None:
        ended = clusterrun_cli("plan", flag, "cluster.nodes=1,2")
        assert ended.code == 0, ended.stderr
        rows = re.findall(r"^nodes=(\d) +(\S+) +to submit +(\d) x 2", ended.stdout, flags=re.MULTILINE)
        assert [(nodes, planned) for nodes, _, planned in rows] == [("1", "1"), ("2", "2")]
        assert len({run for _, run, _ in rows}) == 2

    @pytest.mark.parametrize(
        ("typed", "expected"),
        [
            ("clusterrun cluster=a100", {"cluster=a100_nvswitch", "cluster=a100_pcie"}),
            ("clusterrun +cluster=l", {"+cluster=l40s_pcie", "+cluster=lab", "+cluster=laptop"}),
            ("clusterrun plan train=ddp", {"train=ddp_linear", "train=ddp_mlp"}),
            ("clusterrun plan cluster=lab cluster.slurm.part", {"cluster.slurm.partition="}),
        ],
    )
    def test_completion(self, typed: str, expected: set[str], clusterrun_cli: Run) -> None:
        ended = clusterrun_cli("-sc", "query=bash", env={"COMP_LINE": typed})
        assert (ended.code, set(ended.stdout.split()), ended.stderr) == (0, expected, "")

    def test_completion_asked_by_a_person(self, clusterrun_here: Run) -> None:
        ended = clusterrun_here("-sc", "query=bash")
        assert ended.code == 2
        assert "-sc install=bash" in ended.stderr

    def test_completion_in_a_real_shell(self, clusterrun_cli: Run, place: Path) -> None:
        script = 'eval "$(clusterrun -sc install=bash)"; complete -p clusterrun'
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", script],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "-F hydra_bash_completion clusterrun" in done.stdout, done.stderr


def test_a_reader_that_goes_away(shared: Path) -> None:
    """``clusterrun plan | head -1`` ends quietly."""
    command = f"{sys.executable} -m clusterrun plan cluster=lab | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run ")
