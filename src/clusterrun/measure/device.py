"""What one device does by itself: a matrix product, and copies between host and device. Imports torch."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

from clusterrun.measure.pcie import PcieLink

_GPU_SIZE, _CPU_SIZE = 8192, 512  # rows and columns: 1.1 TFLOP and 0.27 GFLOP
_GPU_PRODUCTS, _CPU_PRODUCTS = 60, 15
_GPU_COPY, _CPU_COPY = 256 * 2**20, 16 * 2**20  # bytes
_GPU_COPIES, _CPU_COPIES = 40, 8


def uuid_of(device: torch.device) -> str:
    """As NVML spells it; "" for a CPU and where this torch does not say."""
    if device.type != "cuda":
        return ""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{found}" if found is not None else ""


def multiply(device: torch.device, local: int) -> dict[str, Any]:
    """Rate of a square matrix product (bf16, fp16 before Ampere, fp32 on a CPU), and whether it is repeatable.

    On a GPU the median counts. On a CPU the fastest does, on one core of this worker's: others share it.
    """
    if device.type == "cuda":
        kind = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
        a, b = (torch.randn(_GPU_SIZE, _GPU_SIZE, device=device).to(kind) for _ in range(2))
        first = a @ b
        times = _gpu_times(lambda: torch.matmul(a, b), _GPU_PRODUCTS)
        seconds = statistics.median(times[len(times) // 4 :])  # the first ones find the clocks low
        size = _GPU_SIZE
    else:
        cores = sorted(os.sched_getaffinity(0))
        threads = torch.get_num_threads()
        os.sched_setaffinity(0, {cores[local % len(cores)]})
        torch.set_num_threads(1)
        try:
            a, b = (torch.randn(_CPU_SIZE, _CPU_SIZE) for _ in range(2))
            first = a @ b
            seconds = min(_cpu_times(lambda: torch.matmul(a, b), _CPU_PRODUCTS))
        finally:
            os.sched_setaffinity(0, set(cores))
            torch.set_num_threads(threads)
        size = _CPU_SIZE
    return {"flops": 2 * size**3 / seconds, "repeatable": bool(torch.equal(first, a @ b))}


def copy(device: torch.device, uuid: str) -> dict[str, Any]:
    """Rates of copies each way, and the PCIe link as NVML shows it while they are under way."""
    if device.type != "cuda":
        one, other = torch.zeros(_CPU_COPY, dtype=torch.uint8), torch.zeros(_CPU_COPY, dtype=torch.uint8)
        seconds = min(_cpu_times(lambda: other.copy_(one), _CPU_COPIES))
        return {"to_device": _CPU_COPY / seconds, "from_device": _CPU_COPY / seconds}
    host = torch.empty(_GPU_COPY, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_GPU_COPY, dtype=torch.uint8, device=device)
    to = statistics.median(_gpu_times(lambda: there.copy_(host, non_blocking=True), _GPU_COPIES))
    back = statistics.median(_gpu_times(lambda: host.copy_(there, non_blocking=True), _GPU_COPIES))
    link = PcieLink(uuid)
    for _ in range(_GPU_COPIES):  # in the background
        there.copy_(host, non_blocking=True)
    gen, width = link.now()
    busy = not torch.cuda.current_stream(device).query()
    torch.cuda.synchronize(device)
    found: dict[str, Any] = {"to_device": _GPU_COPY / to, "from_device": _GPU_COPY / back}
    if not busy and not link.problem:
        return found | {"pcie_problem": "the copies had ended before NVML answered"}
    return found | {"pcie_gen": gen, "pcie_width": width, "pcie_problem": link.problem}


def _gpu_times(run: Any, times: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]  # type: ignore[no-untyped-call]
    run()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [marks[i].elapsed_time(marks[i + 1]) / 1000 for i in range(times)]


def _cpu_times(run: Any, times: int) -> list[float]:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found
