"""Run directories for tests of the report, written by the same writers as real ones: events, ledger, preflight.

The story of ``hopper``: two HGX H100 nodes, one of them with a GPU that lost its NVLinks; preempted once, a node lost
once, then done.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from unittest import mock

from clusterrun.config import frozen
from clusterrun.config.compose import compose
from clusterrun.config.validate import validated
from clusterrun.launch.plan import make_plan
from clusterrun.ledger import Ending, Ledger
from clusterrun.rundir import RunDir, write_durably
from clusterrun.train.events import EventLog

BEGIN = 1_760_000_000.0


class Clock:
    """The time that the writers see."""

    def __init__(self) -> None:
        self.now = BEGIN

    def time(self) -> float:
        return self.now


def run_with(shared: Path, overrides: list[str], run_id: str, parent: Path | None = None) -> RunDir:
    config = validated(compose([*overrides, f"cluster.shared_dir={shared}"]))
    run = RunDir.create_in(parent, run_id) if parent else RunDir.create(shared, run_id)
    run.config.write_text(frozen.to_yaml(config))
    run.plan.write_text(json.dumps(make_plan(config, run_id).as_json()))
    return run


def trained(
    run: RunDir,
    clock: Clock,
    number: int,
    steps: range,
    *,
    world: int,
    total: int,
    step_s: float,
    share: float,
    resumed: int | None,
    done: bool,
) -> None:
    """Rank 0's events of one attempt, a step event every ten steps."""
    noise = random.Random(number)
    attempt = run.attempt(number)
    attempt.make()
    log = EventLog(attempt.event_file("n1", 0), 0)
    fields = {"epoch": 0, "world_size": world, "global_batch": 32 * world, "batch_per_rank": 32, "micro_batch": 32}
    fields |= {"accumulate": 1, "train_samples": 60_000, "valid_samples": 10_000, "parameters": 124_439_808}
    fields |= {"device": "cuda:0", "backend": "nccl", "torch": "2.13.0"}
    clock.now += 24
    log.write("start", step=steps.start, total_steps=total, resumed_from=resumed, **fields)
    clock.now += 3
    log.write("ready", step=steps.start)
    for step in range(steps.start + 10, steps.stop + 1, 10):
        took = step_s * noise.uniform(0.97, 1.12)
        clock.now += 10 * took
        loss = 0.7 + 6.5 * math.exp(-step / (0.28 * total)) + noise.gauss(0, 0.05)
        log.write(
            "step",
            step=step,
            epoch=0,
            loss=loss,
            lr=3e-4,
            samples_per_s=32 * world / took,
            step_time_s=took,
            data_time_s=took * 0.03,
            comm_time_s=took * share * noise.uniform(0.9, 1.1),
        )
        if step % 200 == 0:
            clock.now += 1.2
            log.write(
                "checkpoint",
                step=step,
                ok=True,
                path=f"step-{step}",
                seconds=6.0,
                stall_s=1.2,
                bytes=3 * 10**9,
                reason="every_steps",
            )
            log.write("eval", step=step, loss=loss + 0.12, metric="accuracy", value=1 - loss / 8)
    if done:
        log.write("done", step=total, loss=0.83, metric="accuracy", value=0.9083, saved_step=total)
    log.close()


def hopper(shared: Path, run_id: str = "gpt-hopper-5eed0001") -> RunDir:
    """The run of the story above."""
    import synthetic_reports
    from clusterrun.preflight.report import Finding, Verdict

    overrides = ["cluster=h100_nvswitch_ib", "train=gpt", "cluster.nodes=2", "cluster.spare_nodes=1"]
    run = run_with(shared, [*overrides, "train.max_steps=1600", "cluster.local_paths_shared=true"], run_id)
    clock, ledger = Clock(), Ledger(run.ledger)
    with mock.patch("time.time", clock.time):
        for number, steps, ending, saved in (
            (1, range(650), Ending.preempted, 650),
            (2, range(650, 1110), Ending.node_lost, 1000),
            (3, range(1000, 1600), Ending.done, 1600),
        ):
            same_job = number == 3  # a node was lost: again in the same allocation
            queued = None if same_job else clock.now
            clock.now += 0 if same_job else 90 * number
            before = {1: None, 2: 650, 3: 1000}[number]
            reason = {1: "first start", 2: "after preempted", 3: "after node_lost"}[number]
            ledger.start(reason=reason, job_id="4711", saved_before=before, queued_since=queued)
            run.attempt(number).make()
            clock.now += 18
            nodes = ["n1", "n3"] if number == 3 else ["n1", "n2"]
            ledger.chose(number, nodes)
            story = {"world": 16, "total": 1600, "step_s": 0.31, "share": 0.22, "resumed": before}
            trained(run, clock, number, steps, **story, done=number == 3)  # type: ignore[arg-type]
            clock.now += 12
            text = {Ending.preempted: "state saved", Ending.node_lost: "no word from n2", Ending.done: ""}[ending]
            ledger.end(number, ending, saved_after=saved, exit_code=0 if number == 3 else None, message=text)
    for node in ("n1", "n2", "n3"):
        broken = node == "n2"
        report = dataclasses.asdict(synthetic_reports.report(node, BEGIN, broken=broken))
        findings = [
            Finding("gpu_count", node, Verdict.PASS, "8 GPUs"),
            Finding("clock", node, Verdict.PASS, "0.1 s off"),
        ]
        findings += [Finding("ecc", node, Verdict.UNKNOWN, "the driver does not say")]
        if broken:
            lost = "GPU5 has lost all NVLinks: <b>declared NV18</b>, detected SYS"
            findings.append(Finding("wiring_as_declared", node, Verdict.FAIL, lost, "drain the node"))
        value = {
            "report": report,
            "findings": [f.as_json() for f in findings],
            "chosen": not broken,
            "refused": lost if broken else None,
        }
        write_durably(run.attempt(3).report(node), json.dumps(value))
    return run


def scaling_sweep(shared: Path, sweep_id: str = "gpt-h100-scaling") -> Path:
    """Eight points over nodes and workers; what it costs to leave a node shows."""
    import yaml

    from clusterrun.rundir import SweepDir

    sweep = SweepDir.of(shared, sweep_id)
    sweep.make()
    points = []
    for nodes in (1, 2):
        for workers in (1, 2, 4, 8):
            world = nodes * workers
            own = [f"cluster.nodes={nodes}", f"cluster.nproc_per_node={workers}"]
            overrides = ["cluster=h100_nvswitch_ib", "train=gpt", *own, "cluster.local_paths_shared=true"]
            run = run_with(shared, overrides, f"gpt-h100-{world:02}{nodes}aaaa", parent=sweep.root)
            clock, ledger = Clock(), Ledger(run.ledger)
            with mock.patch("time.time", clock.time):
                ledger.start(
                    reason="first start", job_id=f"12_{len(points)}", saved_before=None, queued_since=clock.now - 5
                )
                run.attempt(1).make()
                clock.now += 9
                ledger.chose(1, [f"n{i}" for i in range(nodes)])
                share = 0.0 if world == 1 else 0.05 + 0.02 * math.log2(workers) + (0.14 if nodes > 1 else 0)
                if (nodes, workers) != (2, 4):
                    story = {"world": world, "total": 200, "step_s": 0.2 / (1 - share), "share": share, "resumed": None}
                    trained(run, clock, 1, range(200), **story, done=True)  # type: ignore[arg-type]
                    ledger.end(1, Ending.done, saved_after=200, exit_code=0)
                else:
                    ledger.end(1, Ending.user_code_failed, saved_after=None, exit_code=1, message="CUDA out of memory")
            points.append({"run": run.id, "overrides": overrides})
    command = ["clusterrun", "-m", "cluster=h100_nvswitch_ib", "train=gpt", "cluster.nodes=1,2"]
    command.append("cluster.nproc_per_node=1,2,4,8")
    value = {"id": sweep_id, "command": command, "points": points}
    sweep.sweep.write_text(yaml.safe_dump(value))
    return sweep.root
