"""What the slow checks share: who answered, what a value is worth among its peers, and names.

"Usual" is the median of the peers; slow is below ``preflight.slow_below`` of it and, for single values, outside of
their spread. Workers on CPUs share cores and memory, so that only a gross difference says something there.
Without a peer there is nothing to hold a value against: UNKNOWN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TypeVar

from clusterrun.config.schema import Accelerator
from clusterrun.config.user_dirs import user_config_dirs
from clusterrun.cost.catalog import Catalog, GpuFigures
from clusterrun.measure.blame import outliers
from clusterrun.measure.results import IMPORT, WAIT, DeviceResult, NodeMeasured, Stuck
from clusterrun.preflight.checks.per_gpu import label
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.gpu_facts import GpuHealth
from clusterrun.preflight.report import Verdict

Key = TypeVar("Key", str, tuple[str, int])

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
RETRY = "see attempts/<n>/steps/preflight-*.err"
_GPU_BELOW, _CPU_BELOW = 0.75, 0.25


def slow_below(e: Evidence) -> float:
    """The share of the peers' rate below which one is slow."""
    if e.preflight.slow_below is not None:
        return e.preflight.slow_below
    return _GPU_BELOW if e.cluster.accelerator is Accelerator.cuda else _CPU_BELOW


def answers(e: Evidence) -> Iterator[tuple[str, NodeMeasured]]:
    if e.slow is not None:
        yield from e.slow.local.items()


def judged_among(values: Mapping[Key, float], below: float, unit: str) -> dict[Key, tuple[Verdict, str]]:
    """Each value among the others."""
    found = {}
    for key, (slow, usual) in outliers(values, below).items():
        own = rate_text(values[key], unit)
        if slow is None:
            found[key] = UNKNOWN, f"{own}, no peer to hold it against"
        else:
            found[key] = (FAIL, f"{own}, the peers {rate_text(usual, unit)}") if slow else (PASS, own)
    return found


def health_of(e: Evidence, node: str, device: DeviceResult) -> GpuHealth | None:
    report = e.reports.get(node)
    facts = report.gpus.health if report and report.gpus else ()
    return next((gpu for gpu in facts if device.uuid and gpu.uuid == device.uuid), None)


def model_of(e: Evidence, node: str, device: DeviceResult) -> str | None:
    gpu = health_of(e, node, device)
    return gpu.model if gpu else None


def rank_name(e: Evidence, node: str, local: int) -> str:
    """The GPU as it is known elsewhere; a CPU has only its worker's number."""
    said = e.slow.local.get(node) if e.slow else None
    device = next((one for one in said.devices if one.local == local), None) if said else None
    gpu = health_of(e, node, device) if device else None
    if gpu is not None:
        return label(gpu)
    return f"{'GPU' if e.cluster.accelerator is Accelerator.cuda else 'worker '}{local}"


def not_reached(said: NodeMeasured) -> str:
    first = next(iter(said.stuck), None)
    return f"not measured: {at(first)}: {first.why}" if first else "not measured"


def at(stuck: Stuck) -> str:
    return {WAIT: "waiting for the other ranks", IMPORT: "import of torch"}.get(stuck.what, stuck.what)


def published(e: Evidence, node: str, device: DeviceResult) -> GpuFigures | None:
    """What the catalogue says of a GPU; None for a CPU and a model it does not know."""
    if e.cluster.accelerator is not Accelerator.cuda:
        return None
    model = model_of(e, node, device) or e.cluster.gpu_model
    return _figures(model) if model else None


@functools.cache
def _figures(model: str) -> GpuFigures | None:
    found = Catalog(user_config_dirs()).find_gpu(model)
    return found[1] if found else None


def with_catalogue(said: tuple[Verdict, str], own: float | None, least: float | None, unit: str) -> tuple[Verdict, str]:
    """A verdict among the peers, looked at again: all of them may be slow, and one alone has no peers.

    ``least``: what such hardware reaches at least, by the catalogue. Below it is a warning: a figure that somebody else
    measured refuses no node.
    """
    verdict, text = said
    if own is None or least is None or verdict is FAIL:
        return said
    if own < least:
        return WARN, f"{rate_text(own, unit)}, by the catalogue at least {rate_text(least, unit)}"
    return PASS, text.replace(", no peer to hold it against", ", as the catalogue has it")


def rate_text(value: float | None, unit: str) -> str:
    """Three digits with a decimal prefix: 12.5 GB/s."""
    value = value or 0.0
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
