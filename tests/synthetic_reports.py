"""Reports of many nodes, cloned from two real readings: the stub driver of a sound and of a broken HGX H100."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "nvml_stub"))
import scenarios

from clusterrun.preflight.gpu_facts import GpuFacts, read_gpu_facts
from clusterrun.preflight.report import NodeReport


@functools.cache
def gpu_facts(broken: bool) -> GpuFacts:
    """Eight GPUs as pynvml reports them; broken: GPU5 has lost all its NVLinks."""
    with tempfile.TemporaryDirectory() as scratch:
        scenario = scenarios.link_down_here() if broken else scenarios.healthy(scenarios.hgx_h100())
        path = scenarios.write(scenario, Path(scratch) / "scenario")
        library = scenarios.build(Path(scratch))
        env = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB_SCENARIO": str(path)}
        facts = read_gpu_facts(env=env, loads=lambda: True)
    assert len(facts.health) == 8, facts.problem
    return facts


def report(node: str, time: float, *, broken: bool) -> NodeReport:
    return NodeReport(
        node=node,
        host=node,
        time=time,
        python="3.11.2",
        executable="/venv/bin/python",
        packages={"clusterrun": "0.1.0", "torch": "2.13.0"},
        visible_gpus=8,
        nvml_gpus=8,
        nvml_problem="",
        cpus=128,
        address="10.0.0.1",
        address_problem="",
        port=21_000,
        run_dir_problem="",
        gpus=dataclasses.replace(gpu_facts(broken)),
    )
