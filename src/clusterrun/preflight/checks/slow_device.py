"""Slow checks of each device by itself: matrix products, copies, the PCIe link under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from clusterrun.config.schema import Accelerator
from clusterrun.cost.catalog import PCIE_X16_GB_PER_S
from clusterrun.measure.results import COPIES, PRODUCT, DeviceResult
from clusterrun.preflight.checks.per_gpu import several
from clusterrun.preflight.checks.slow_parts import (
    FAIL,
    PASS,
    UNKNOWN,
    WARN,
    answers,
    health_of,
    judged_among,
    model_of,
    published,
    rank_name,
    slow_below,
    with_catalogue,
)
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import Finding, Verdict

_LEAST_OF_WIRE = 0.6
_WORSE = (PASS, WARN, UNKNOWN, FAIL)


def gemm_speed(e: Evidence) -> Iterator[Finding]:
    judged = _among_peers(e, lambda d: d.flops, "FLOP/s")

    def one(node: str, device: DeviceResult) -> tuple[Verdict, str]:
        if device.repeatable is False:
            return FAIL, "the same product gave other bits"
        figures = published(e, node, device)
        usual = figures.achieved_bf16_tflops if figures else None
        least = slow_below(e) * usual * 1e12 if usual else None
        said = judged.get((node, device.local), (UNKNOWN, "not measured"))
        return with_catalogue(said, device.flops, least, "FLOP/s")

    yield from _per_device("gemm_speed", e, PRODUCT, one, "a GPU that throttles or fails: look at clocks, power, heat")


def copy_speed(e: Evidence) -> Iterator[Finding]:
    ways = {
        "to the device": _among_peers(e, lambda d: d.to_device, "B/s"),
        "from the device": _among_peers(e, lambda d: d.from_device, "B/s"),
    }

    def one(node: str, device: DeviceResult) -> tuple[Verdict, str]:
        least = _least_copy(e, node, device)
        rates = {"to the device": device.to_device, "from the device": device.from_device}
        both = []
        for way, judged in ways.items():
            said = judged.get((node, device.local), (UNKNOWN, "not measured"))
            both.append((way, with_catalogue(said, rates[way], least, "B/s")))
        way, (verdict, text) = max(both, key=lambda part: _WORSE.index(part[1][0]))
        return verdict, f"{way} {text}"

    yield from _per_device("copy_speed", e, COPIES, one, "PCIe slot, riser, or a wrong NUMA binding")


def pcie_under_load(e: Evidence) -> Iterator[Finding]:
    """Only where there are GPUs: nothing of a CPU hangs on PCIe."""
    if e.cluster.accelerator is not Accelerator.cuda:
        return

    def one(node: str, device: DeviceResult) -> tuple[Verdict, str]:
        gpu = health_of(e, node, device)
        if device.pcie_gen is None or device.pcie_width is None:
            return UNKNOWN, device.pcie_problem or "not measured"
        now = f"generation {device.pcie_gen} x{device.pcie_width} while copying"
        if gpu is None or gpu.pcie_gen_max is None or gpu.pcie_width_max is None:
            return UNKNOWN, f"{now}, what it could be is not known"
        if device.pcie_gen < gpu.pcie_gen_max or device.pcie_width < gpu.pcie_width_max:
            return FAIL, f"{now}, could be generation {gpu.pcie_gen_max} x{gpu.pcie_width_max}"
        return PASS, now

    yield from _per_device("pcie_under_load", e, COPIES, one, "reseat the card; check the slot and the BIOS setting")


def _least_copy(e: Evidence, node: str, device: DeviceResult) -> float | None:
    """What a copy over this PCIe link reaches at least. Others check for 9 to 10 GB/s over 16 lanes of generation 3,
    for 21 of 4 and 48 of 5 (Azure's node health checks), which is 0.6 of the wire and more."""
    gpu = health_of(e, node, device)
    gen = device.pcie_gen or (gpu.pcie_gen_max if gpu else None)
    width = device.pcie_width or (gpu.pcie_width_max if gpu else None)
    if e.cluster.accelerator is not Accelerator.cuda or not width or gen is None or gen not in PCIE_X16_GB_PER_S:
        return None
    return _LEAST_OF_WIRE * PCIE_X16_GB_PER_S[gen] * 1e9 * width / 16


def _per_device(
    name: str,
    e: Evidence,
    part: str,
    judge: Callable[[str, DeviceResult], tuple[Verdict, str]],
    advice: str,
) -> Iterator[Finding]:
    """One finding for all devices of a node: the worst, those that did not pass named."""
    for node, said in answers(e):
        lines: list[tuple[Verdict, str]] = []
        for local in range(e.cluster.nproc_per_node):
            stuck = next((one for one in said.stuck if one.what == part and one.local == local), None)
            device = next((one for one in said.devices if one.local == local), None)
            if stuck:
                verdict, text = FAIL, f"{part}: {stuck.why}"
            elif device is None:
                verdict, text = UNKNOWN, "not measured"
            else:
                verdict, text = judge(node, device)
            lines.append((verdict, f"{rank_name(e, node, local)}: {text}"))
        worst = max((verdict for verdict, _ in lines), key=_WORSE.index)
        shown = [text for verdict, text in lines if verdict is worst]
        text = shown[0] if worst is PASS and len(shown) == 1 else several(shown, "; ")
        yield Finding(name, node, worst, text, advice if worst is FAIL else "")


def _among_peers(
    e: Evidence, value: Callable[[DeviceResult], float | None], unit: str
) -> dict[tuple[str, int], tuple[Verdict, str]]:
    """(node, local rank) -> how its value stands among all devices of the same model."""
    by_model: dict[str | None, dict[tuple[str, int], float]] = {}
    for node, said in answers(e):
        for device in said.devices:
            rate = value(device)
            if rate is not None:
                by_model.setdefault(model_of(e, node, device), {})[node, device.local] = rate
    judged: dict[tuple[str, int], tuple[Verdict, str]] = {}
    for values in by_model.values():
        judged |= judged_among(values, slow_below(e), unit)
    return judged
