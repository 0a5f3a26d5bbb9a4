"""Reports: figures worked out by hand, hostile texts, commands that give the configuration again."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

import sample_runs
from clusterrun.config import frozen
from clusterrun.config.compose import compose
from clusterrun.config.overrides import as_overrides, gives_again, spelled
from clusterrun.config.validate import validated
from clusterrun.ledger import Ending, Ledger
from clusterrun.measure.results import Row
from clusterrun.report import svg
from clusterrun.report.facts import predicted, read_facts
from clusterrun.report.html_run import run_page
from clusterrun.report.scaling import ScalingPoint, compared
from clusterrun.report.side_by_side import side_by_side
from clusterrun.train.events import EventLog
from conftest import Ended

Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_runs.hopper(tmp_path_factory.mktemp("hopper")).root


def point(nodes: int, workers: int, rate: float | None, series: str = "") -> ScalingPoint:
    shape = {"nodes": nodes, "nproc_per_node": workers, "world_size": nodes * workers, "series": series}
    empty = dict.fromkeys(("step_s", "speedup", "efficiency", "communication", "busbw_gb_s", "loss", "metric", "value"))
    return ScalingPoint(name="p", run="r", state="done", samples_per_s=rate, overrides=(), **shape, **empty)  # type: ignore[arg-type]


def test_speedup_and_efficiency_by_hand() -> None:
    """100 samples/s with one worker, 170 with two, 300 with four on two nodes; another series has its own base."""
    found = compared([point(2, 2, 300), point(1, 1, 100), point(1, 2, 170), point(1, 4, None), point(1, 2, 50, "b")])
    assert [p.speedup for p in found] == [3.0, 1.0, 1.7, None, 1.0]
    assert [p.efficiency for p in found] == [0.75, 1.0, 0.85, None, 1.0]


def test_facts_of_a_run_with_faults(hopper: Path) -> None:
    facts = read_facts(sample_runs.RunDir(hopper))
    assert facts.state == "done"
    assert [e["step"] for e in facts.steps] == list(range(10, 1601, 10))  # the 11 steps that were lost count once
    assert facts.communication == pytest.approx(0.22, rel=0.05)
    assert facts.data_wait == pytest.approx(0.03, rel=0.01)
    assert facts.samples_per_s == pytest.approx(512 / 0.31, rel=0.06)
    assert set(facts.topologies) == {"n1", "n2", "n3"}
    assert 10 <= facts.account.sum.rework <= 60
    assert facts.nodes == ("n1", "n3")
    plan = json.loads(facts.run.plan.read_text())["prediction"]
    said = predicted(facts)
    assert said.endswith(f"({plan['bottleneck']})")
    assert f"{plan['share']:.0%} of it waiting for gradients" in said
    assert said in run_page(facts).replace("&#x27;", "'")


def test_the_four_numbers_stand_side_by_side(tmp_path: Path) -> None:
    """Wiring and step: declared, detected by preflight, predicted, and measured by a bench of the same cluster."""
    run = sample_runs.hopper(tmp_path)
    bench = sample_runs.run_with(
        tmp_path, ["+cluster=h100_nvswitch_ib", "cluster.local_paths_shared=true", "action=bench"], "bench-1"
    )
    bench.attempt(1).make()
    rows = {"all": (range(16), 1 << 28, 1.4e-3), "in_node": (range(8), 1 << 28, 1.1e-3)}
    log = EventLog(bench.attempt(1).event_file("n1", 0), 0)
    for phase, (ranks, size, seconds) in rows.items():
        row = Row(phase, tuple(ranks), "all_reduce", size, seconds, seconds, 20, 0)
        log.write("measured", **row.as_json())
    log.close()
    lines = {line.what: line for line in side_by_side(read_facts(run))}
    inside = lines["in a node"]
    assert inside.declared == "NVSwitch (NV18)"
    assert "full nvlink mesh, worst link NV18 (n1, n3)" in inside.detected
    assert inside.predicted.endswith("GB/s (256 MiB)")
    assert inside.measured == "427 GB/s (256 MiB)"  # 2^28 / 1.1 ms x 14/8
    assert lines["all ranks"].measured == "360 GB/s (256 MiB)"
    assert lines["between nodes"].declared == "8 x 400 Gbit/s infiniband"
    assert lines["between nodes"].measured == "-", "nobody measured it"
    assert all(line.predicted != "-" for line in lines.values())
    assert lines["samples/s"].measured != "-"
    page = run_page(read_facts(run))
    assert "Declared, detected, predicted, measured" in page
    assert "427 GB/s (256 MiB)" in page


class Reader(HTMLParser):
    """What a page refers to, and whether its tags are closed as they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [str(v) for k, v in attrs if k in ("src", "href", "action", "srcset", "data", "poster")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())


def test_a_page_is_whole_and_asks_for_nothing(hopper: Path) -> None:
    text = run_page(read_facts(sample_runs.RunDir(hopper)))
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert reader.references == []
    assert not reader.tags & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text
    for said in (
        "Loss",
        "Throughput",
        "What a step is made of",
        "Where the time went",
        "Wiring",
        "Preflight",
        "7 pairs differ",
    ):
        assert said in text, said
    assert len(text) < 200_000


def test_hostile_text_stays_text(hopper: Path) -> None:
    facts = read_facts(sample_runs.RunDir(hopper))
    bad = "</title><script>alert(1)</script><img src=x onerror=alert(1)>"
    attempts = [
        dataclasses.replace(a, message=bad, reason=bad, nodes=(bad,), ending=Ending.crashed) for a in facts.attempts
    ]
    results = [dataclasses.replace(r, node=bad, refused=bad) for r in facts.preflight]
    facts.config.cluster.name = facts.config.train.task = bad
    hostile = dataclasses.replace(facts, attempts=attempts, preflight=results, topologies={bad: facts.topologies["n2"]})
    text = run_page(hostile)
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("&lt;script&gt;") > 3


def test_a_run_that_never_began_has_a_page(tmp_path: Path) -> None:
    run = sample_runs.run_with(tmp_path, ["cluster=laptop"], "fresh-1")
    text = run_page(read_facts(run))
    assert "not started" in text
    ledger = Ledger(run.ledger)
    ledger.start(reason="first start", job_id="1", saved_before=None)
    ledger.end(1, Ending.not_enough_nodes, saved_after=None, exit_code=4, message="1 of 2 nodes healthy")
    text = run_page(read_facts(run))
    assert "not enough nodes" in text
    assert "1 of 2 nodes healthy" in text


CONFIGS: list[list[str]] = [
    [],
    ["cluster=h100_nvswitch_ib", "train=gpt", "cluster.nodes=4", "train.max_steps=7", "checkpoint=off"],
    ["cluster=lab", "train=ddp_mlp", "data=mnist5k", "train.task_args.hidden=64", "cluster.env.A='a b,c=[1]'"],
    ["cluster.slurm.setup=['module load cuda','echo \"it\\'s\"']", "cluster.slurm.comment='x: {y}'", "seed=3"],
    [
        "preflight.policy.clock=fatal",
        "train.lr=1e-7",
        "cluster.slurm.comment='null'",
        "cluster.slurm.extra.switches='1'",
    ],
    ["cluster.slurm.comment='back\\\\slash'", "cluster.slurm.setup=['a\\\\']"],
]


@pytest.mark.parametrize("overrides", CONFIGS, ids=str)
def test_the_command_gives_the_configuration_again(place: Path, overrides: list[str]) -> None:
    config = validated(compose([*overrides, "cluster.shared_dir=/nfs/me"]))
    again = as_overrides(config)
    assert gives_again(config, again), again
    assert frozen.to_dict(validated(compose([*again, "cluster.shared_dir=/nfs/me"]))) == frozen.to_dict(config)


def test_spelled_in_hydras_grammar() -> None:
    assert spelled(["a", 1, None, True, "x y"]) == "[a,1,null,true,'x y']"
    assert spelled({"a": {"b": "true"}}) == "{a:{b:'true'}}"
    assert spelled("it's") == r"'it\'s'"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 0, [0, 0.25, 0.5, 0.75, 1]),
        (3, 17, [0, 5, 10, 15, 20]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_and_cover(low: float, high: float, expected: list[float]) -> None:
    assert svg.ticks(low, high) == expected


def test_numbers_are_short() -> None:
    shown = [svg.number(v) for v in (0, 0.25, 12.5, 3200, 45_000, 1.2e6, 2e9, 0.00001)]
    assert shown == ["0", "0.25", "12.5", "3,200", "45k", "1.2M", "2G", "1.0e-05"]


def test_charts_survive_what_is_not_a_number() -> None:
    nan = svg.Series("loss", [1, 2, 3], [float("nan"), float("inf"), 1.0])
    assert "nan" not in svg.line_chart(300, "x", [nan], "step", "loss").lower().replace("nothing", "")
    assert "nothing was measured" in svg.line_chart(300, "x", [], "step", "loss")
    assert "nothing was measured" in svg.bar_chart(300, "x", [svg.Bar("a", [svg.Part(0.0, 1, "")])], "s")


def test_report_of_a_sweep_for_machines(clusterrun_here: Run, place: Path, tmp_path: Path) -> None:
    root = sample_runs.scaling_sweep(place / "shared")
    ended = clusterrun_here("report", "gpt-h100", "--csv")
    assert ended.code == 0, ended.stderr
    rows = list(csv.DictReader(io.StringIO(ended.stdout)))
    assert len(rows) == 8
    by_shape = {(r["nodes"], r["nproc_per_node"]): r for r in rows}
    assert by_shape["2", "4"]["state"] == "user code failed"
    assert by_shape["2", "4"]["speedup"] == ""
    one, two = float(by_shape["1", "8"]["efficiency"]), float(by_shape["2", "8"]["efficiency"])
    assert 0.7 < two < one < 1.0
    value = json.loads(clusterrun_here("report", root.name, "--json").stdout)
    assert [p["communication"] is None for p in value["points"]] == [True] + [False] * 5 + [True, False]
    shown = clusterrun_here("report", root.name).stdout
    assert re.search(r"2 x 8 +1,7\d\d +\d\d?\.\d\d +\d\d% +2\d% +-", shown), shown
    for name in ("scaling.svg", "scaling.png"):
        assert clusterrun_here("report", root.name, "--plot", str(tmp_path / name)).code == 0
        assert (tmp_path / name).stat().st_size > 3000
    assert clusterrun_here("report", root.name, "--plot", str(tmp_path / "x.bmp")).code == 2


def test_report_of_a_run(clusterrun_here: Run, place: Path) -> None:
    run = sample_runs.hopper(place / "shared")
    shown = clusterrun_here("report", run.id)
    assert shown.code == 0, shown.stderr
    assert re.search(r"goodput +\d\d % of 16:\d\d", shown.stdout)
    assert [line.split()[-1] for line in shown.stdout.splitlines()[-3:]] == ["preempted", "node_lost", "done"]
    value = json.loads(clusterrun_here("report", run.id, "--json").stdout)
    assert value["step"] == 1600
    assert [a["ending"] for a in value["attempts"]] == ["preempted", "node_lost", "done"]
    wrote = clusterrun_here("report", run.id, "--html")
    assert wrote.stdout == f"wrote {run.report}\n"
    for wrong, said in (
        (["nothing-so-named"], "no such run"),
        ([run.id, "--csv"], "for sweeps"),
        ([run.id, "--html", "/no/x"], "can't be"),
    ):
        ended = clusterrun_here("report", *wrong)
        assert ended.code == 2
        assert said in ended.stderr
