"""Points of a sweep: every form of Hydra's sweepers, composed as Hydra composes them, planned as arrays by shape."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterrun.config import points as sweep_points
from clusterrun.config.compose import compose
from clusterrun.config.points import Point, Swept, sweep
from clusterrun.errors import ConfigError
from clusterrun.launch.sweep_plan import plan_sweep, point_names
from conftest import Ended

Run = Callable[..., Ended]


def never(batch: list[Point]) -> list[float | Exception]:
    raise AssertionError("Hydra's own sweeper wants no results")


def swept(*arguments: str) -> Swept:
    return sweep(["-m", *arguments], never)


FORMS = [
    (["cluster.nodes=1,2", "cluster.nproc_per_node=1,2,4"], 6),
    (["train.lr=choice(0.1,0.2)", "seed=range(0,3)"], 6),
    (["train=glob(ddp_*)", "cluster=lab,laptop"], 4),
    (["train.lr=0.1,0.2", "+cluster=lab", "train.task_args.depth=1,2"], 4),
    (["seed=shuffle(range(0,4))"], 4),
    (["train.task_args={depth: 2},{depth: 3}"], 2),
    (["seed=1,2", "hydra.sweeper.max_batch_size=1"], 2),
    (["train.lr=0.1"], 1),
]


@pytest.mark.parametrize(("arguments", "count"), FORMS, ids=lambda v: " ".join(v) if isinstance(v, list) else None)
def test_every_point_is_what_hydra_composes(place: Path, arguments: list[str], count: int) -> None:
    found = swept(*arguments).points
    assert [p.number for p in found] == list(range(count))
    for point in found:
        assert point.config == compose(list(point.overrides)), point.overrides
    assert len({point.overrides for point in found}) == count
    assert not list(Path.cwd().iterdir())


def test_sweeper_params_from_the_configuration(place: Path) -> None:
    """hydra.sweeper.params, the form that lives in a file."""
    Path("conf/train").mkdir(parents=True)
    text = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 1,2,3\n"
    Path("conf/train/mine.yaml").write_text(text)
    found = swept("train=mine").points
    assert [p.config.seed for p in found if p.config] == [1, 2, 3]


def test_values_from_hydra_are_each_points_own(place: Path) -> None:
    found = swept("seed=5,6", "train.task_args.log='job-${hydra:job.num}'").points
    assert [p.config.train.task_args["log"] for p in found if p.config] == ["job-0", "job-1"]


def test_sharing_is_given_up_when_it_would_differ(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first point is held against Hydra's own composition: here something goes wrong with the shared one."""
    broken = lambda overrides, config: config.__setitem__("seed", 77)  # noqa: E731
    monkeypatch.setattr(sweep_points._Loader, "_apply_overrides_to_config", staticmethod(broken))
    loader = sweep_points.ConfigLoaderImpl
    monkeypatch.setattr(loader, "load_sweep_config", _with_the_real_one(loader))
    assert [p.config.seed for p in swept("seed=1,2,3").points if p.config] == [1, 2, 3]


def _with_the_real_one(loader: type) -> Callable[..., object]:
    plain, real = loader.load_sweep_config, loader._apply_overrides_to_config

    def load(self: object, master: object, overrides: list[str]) -> object:
        broken = sweep_points._Loader._apply_overrides_to_config
        sweep_points._Loader._apply_overrides_to_config = staticmethod(real)  # type: ignore[method-assign]
        try:
            return plain(self, master, overrides)
        finally:
            sweep_points._Loader._apply_overrides_to_config = staticmethod(broken)  # type: ignore[method-assign]

    return load


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hydra/launcher=joblib"], "hydra/launcher"),
        (["seed=1,two"], "seed=two: must be a whole number"),
        (["cluster=laptop,nowhere"], "cluster=nowhere: no such config"),
        (["seed=interval(0,1)"], "does not support"),
        (["hydra/sweeper=nowhere"], "hydra/sweeper=nowhere: no such config"),
        (["hydra.sweeper._target_=nope.Sweeper"], "hydra.sweeper: Invalid plugin 'nope.Sweeper'"),
        (["train=glob(x*)"], "no point"),
    ],
)
def test_what_is_wrong_is_one_line(clusterrun_here: Run, arguments: list[str], said: str) -> None:
    ended = clusterrun_here("-m", *arguments)
    assert ended.code == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_a_wrong_point_hides_no_other(clusterrun_here: Run) -> None:
    ended = clusterrun_here("plan", "-m", "cluster.nodes=1,200000000", "seed=1,2", "--json")
    assert ended.code == 2
    plan = json.loads(ended.stdout)
    assert [p["plan"]["resources"]["nodes"] for p in plan["points"]] == [1, 1]
    assert ended.stderr.count("cluster.nodes=200000000: must be from") == 2


def test_points_of_one_shape_are_one_array(place: Path) -> None:
    plan = plan_sweep(
        swept(
            "cluster=a100_nvswitch", "cluster.nodes=1,2", "train.lr=0.1,0.2,0.3", "cluster.shared_dir=/nfs/me"
        ).points[:5]
        + swept("cluster=a100_nvswitch", "cluster.time_limit=1h", "seed=4,4", "cluster.shared_dir=/nfs/me").points
    )
    assert [len(shape.points) for shape in plan.shapes] == [3, 2, 1]  # equal points are one
    scripts = [shape.text(plan.sweep) for shape in plan.shapes]
    assert "#SBATCH --array=0-2%3\n" in scripts[0]
    assert "#SBATCH --nodes=1\n" in scripts[0]
    assert "#SBATCH --array=0-1%2\n" in scripts[1]
    assert "--array" not in scripts[2]
    assert all(f"#SBATCH --job-name={plan.sweep.id}\n" in script for script in scripts)
    assert len({p.run.root for p in plan.points}) == 6
    assert {p.run.root.parent for p in plan.points} == {plan.sweep.root}


def test_array_parallelism(place: Path) -> None:
    plan = plan_sweep(swept("cluster=lab", "seed=range(0,9)", "sweep.array_parallelism=2").points)
    assert "#SBATCH --array=0-8%2\n" in plan.shapes[0].text(plan.sweep)


def test_the_same_points_are_the_same_sweep(place: Path) -> None:
    one = plan_sweep(swept("seed=1,2", "train.lr=0.1").points)
    other = plan_sweep(swept("train.lr=0.1", "seed=2,1", "wait=false", "sweep.array_parallelism=3").points)
    assert one.sweep == other.sweep
    assert one.sweep.id.startswith("ddp_linear-laptop-")
    assert plan_sweep(swept("seed=1,2,3", "train.lr=0.1").points).sweep != one.sweep


def test_run_id_names_the_sweep(place: Path) -> None:
    plan = plan_sweep(swept("seed=1,2", "run_id=scaling").points)
    assert plan.sweep.id == "scaling"
    alone = plan_sweep(swept("seed=1,2").points)
    assert {p.run.id for p in plan.points} == {p.run.id for p in alone.points}
    named = plan_sweep(swept("run_id=a,b").points)
    assert {p.run.id for p in named.points} == {"a", "b"}


def test_one_directory_for_a_sweep(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.shared_dir: the points of a sweep live in one directory"):
        plan_sweep(swept(f"cluster.shared_dir={place}/a,{place}/b").points)


def test_point_names_are_short_and_tell_points_apart() -> None:
    assert point_names([["x=1", "cluster.nodes=1"], ["x=1", "cluster.nodes=2"]]) == ["nodes=1", "nodes=2"]
    assert point_names([["a.n=1", "b.n=1"], ["a.n=2", "b.n=2"]]) == ["a.n=1 b.n=1", "a.n=2 b.n=2"]
    assert point_names([["x=1"]]) == ["the only point"]
    assert point_names([["t.lr=0.21434078230426126"], ["t.lr=0.1"]]) == ["lr=0.2143", "lr=0.1"]
    assert point_names([["lr=0.100000001"], ["lr=0.100000002"]]) == ["lr=0.100000001", "lr=0.100000002"]


def test_a_point_that_follows_the_first_is_not_composed_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many points cost what two do; a value that is wrong, or refers to another, is still seen."""
    composed: list[int] = []
    real = sweep_points._Launcher._composed
    monkeypatch.setattr(
        sweep_points._Launcher, "_composed", lambda self, n, items: composed.append(n) or real(self, n, items)
    )
    found = swept("seed=range(0,40)", "train.optimizer=sgd,adamw", "train.task_args.depth=2").points
    assert composed == [0, 1]
    assert all(p.config == compose(list(p.overrides)) for p in found[::13])
    found = swept("seed=1,2,3,'${train.epochs}'", "train.epochs=7").points
    assert [p.config.seed for p in found if p.config] == [1, 2, 3, 7]


def test_a_sweep_records_the_code_once_and_resubmission_repairs_what_a_crash_spoilt(place: Path) -> None:
    from clusterrun.config import frozen
    from clusterrun.launch.sweep import submit_sweep

    plan = plan_sweep(swept("seed=1,2").points)
    submit_sweep(plan, {})
    first, second = (p.run for p in plan.points)
    assert first.code.about.resolve() == second.code.about.resolve() == plan.sweep.root / "code" / "code.json"
    text = first.config.read_text()
    first.config.write_bytes(bytes(len(text)))
    second.plan.write_text("")
    submit_sweep(plan, {})
    assert first.config.read_text() == text
    assert frozen.load(first.config) == plan.points[0].config
    assert json.loads(second.plan.read_text())["run_id"] == second.id
    assert [c.root.name for c in plan.sweep.codes()] == ["code"]


def test_other_sweepers_get_their_batches_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweeper from outside, which chooses its points by results; one of its points fails."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "sweeper"))
    for name in [n for n in sys.modules if n.startswith("hydra_plugins")]:
        monkeypatch.delitem(sys.modules, name)
    from hydra.core.plugins import Plugins
    from hydra_plugins.halving_sweeper import HalvingSweeper

    Plugins.instance().register(HalvingSweeper)
    asked: list[list[float]] = []

    def run_batch(batch: list[Point]) -> list[float | Exception]:
        rates = [p.config.train.lr for p in batch if p.config]
        asked.append(rates)
        return [abs(rate - 0.1) for rate in rates]

    target = "hydra.sweeper._target_=hydra_plugins.halving_sweeper.HalvingSweeper"
    found = sweep(["-m", target, "+hydra.sweeper.batches=3", "seed=3"], run_batch)
    assert asked == [[0.4, 0.2], [0.1, 0.4], [0.05, 0.2]]
    assert found.points == []
    assert b"best: 0.1" in found.leftovers["optimization_results.yaml"]

    def failing(batch: list[Point]) -> list[float | Exception]:
        return [1.0, ConfigError("the second failed")]

    with pytest.raises(ConfigError, match="the second failed"):
        sweep(["-m", target, "+hydra.sweeper.batches=1"], failing)
