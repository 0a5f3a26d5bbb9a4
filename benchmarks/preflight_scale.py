"""How preflight grows with nodes. Goal: no worse than linear.

1. Real Slurm: the lab with 64 hosts, `clusterrun preflight` over 4, 16 and 64 of them (skip with --no-lab; it takes the
   present lab down and brings it up again with 4 hosts).
2. The same checks and decision over synthetic reports of up to 4,096 nodes with 8 GPUs each: seconds and peak memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

from clusterrun.config.compose import compose
from clusterrun.config.validate import validated
from clusterrun.preflight.checks import check_all
from clusterrun.preflight.decide import decide
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import NodeReport

ROOT = Path(__file__).parents[1]
LAB = [sys.executable, str(ROOT / "scripts" / "slurm_lab")]
SIZES = (256, 1024, 4096)
GOAL = 1.3  # growth per node from the smallest to the largest, 1.0 is linear


def synthetic(nodes: int) -> tuple[float, float]:
    """Seconds and peak MiB for reports -> findings -> decision, every eighth node with a GPU without NVLinks."""
    sys.path.insert(0, str(ROOT / "tests"))
    from synthetic_reports import report

    wanted = ["+cluster=h100_nvswitch_ib", f"cluster.nodes={nodes - nodes // 8}", "cluster.shared_dir=/srv/shared"]
    no_nics = ["cluster.interconnect.nics_per_node=null", "cluster.interconnect.nic_gbit_per_s=null"]
    config = validated(compose([*wanted, *no_nics, "cluster.interconnect.inter_node=ethernet"]))
    names = [f"n{i:04}" for i in range(nodes)]
    now = time.time()
    plain = {name: dataclasses.asdict(report(name, now, broken=i % 8 == 0)) for i, name in enumerate(names)}
    tracemalloc.start()
    reports = {name: NodeReport.from_json(value) for name, value in plain.items()}
    evidence = Evidence(tuple(names), reports, config.cluster, config.preflight, (now - 5, now + 5))
    decision = decide(names, check_all(evidence), config.cluster.nodes, config.preflight)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    begin = time.perf_counter()  # again without the tracing, which slows it down
    reports = {name: NodeReport.from_json(value) for name, value in plain.items()}
    evidence = dataclasses.replace(evidence, reports=reports)
    decision = decide(names, check_all(evidence), config.cluster.nodes, config.preflight)
    seconds = time.perf_counter() - begin
    assert len(decision.bad) == nodes // 8, (len(decision.bad), list(decision.bad.items())[:2])
    assert len(decision.chosen) == nodes - nodes // 8
    return seconds, peak


def on_the_lab(nodes: int) -> float:
    """Seconds from the start of the preflight step to the decision, as the conductor measured them."""
    with tempfile.TemporaryDirectory() as shared:
        env = {**os.environ, "CLUSTERRUN_SHARED_DIR": shared}
        argv = [sys.executable, "-m", "clusterrun", "preflight", "+cluster=lab", f"cluster.nodes={nodes}", "--json"]
        done = subprocess.run([*argv, "run_id=scale"], env=env, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(
                f"preflight of {nodes} nodes: exit {done.returncode}\n{done.stdout[-500:]}{done.stderr[-500:]}"
            )
        healthy = [n for n in json.loads(done.stdout)["nodes"] if n["chosen"]]
        assert len(healthy) == nodes
        (log,) = (Path(shared) / "runs/scale/submitit").glob("*_log.out")
        line = next(x for x in log.read_text().splitlines() if "nodes answered in" in x)
        return float(line.partition("answered in ")[2].partition(" s")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-lab", action="store_true")
    if not parser.parse_args().no_lab:
        subprocess.run([*LAB, "up", "--nodes", "64"], check=True, stdout=subprocess.DEVNULL)
        try:
            for nodes in (4, 16, 64):
                print(f"lab, {nodes:2} real slurmd hosts on this machine: {on_the_lab(nodes):6.2f} s", flush=True)
        finally:
            subprocess.run([*LAB, "up", "--nodes", "4"], check=True, stdout=subprocess.DEVNULL)
    per_node = {}
    for nodes in SIZES:
        seconds, peak = synthetic(nodes)
        per_node[nodes] = (seconds / nodes, peak / nodes)
        print(f"synthetic, {nodes:5} nodes x 8 GPUs: {seconds:6.2f} s, peak {peak:7.1f} MiB", flush=True)
    growth = per_node[SIZES[-1]][0] / per_node[SIZES[0]][0]
    memory = per_node[SIZES[-1]][1] / per_node[SIZES[0]][1]
    print(
        f"preflight_scale time ratio={growth:.2f} memory ratio={memory:.2f} per node, 4096 against 256 (goal <= {GOAL})"
    )
    return 0 if max(growth, memory) <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
