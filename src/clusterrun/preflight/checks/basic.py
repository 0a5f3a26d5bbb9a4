"""Checks that every run needs, with or without GPUs: answers, versions, devices, directory, address, clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from clusterrun.config.schema import Accelerator, GpuRequest
from clusterrun.preflight.evidence import Check, Evidence
from clusterrun.preflight.report import Finding, NodeReport, Verdict


def answered(e: Evidence) -> Iterator[Finding]:
    for node in e.nodes:
        if node in e.reports:
            yield Finding("answered", node, Verdict.PASS, f"on host {e.reports[node].host}")
        else:
            yield Finding(
                "answered",
                node,
                Verdict.FAIL,
                f"no report within {e.preflight.timeout_s:g} s",
                "see attempts/<n>/steps/preflight.err; is the same Python there?",
            )


def versions(e: Evidence) -> Iterator[Finding]:
    """Python and packages equal on all nodes. The version most nodes have is taken as the right one."""
    if not e.reports:
        return
    names = ["python", *next(iter(e.reports.values())).packages]
    usual = {name: Counter(_version(r, name) for r in e.reports.values()).most_common(1)[0][0] for name in names}
    for node, report in e.reports.items():
        odd = [f"{n} {_version(report, n)} (others: {usual[n]})" for n in names if _version(report, n) != usual[n]]
        if odd:
            yield Finding("versions", node, Verdict.FAIL, ", ".join(odd), "install the same environment on every node")
        else:
            yield Finding("versions", node, Verdict.PASS, f"python {report.python}, torch {_version(report, 'torch')}")


def gpu_count(e: Evidence) -> Iterator[Finding]:
    wanted = e.cluster.nproc_per_node
    for node, report in e.reports.items():
        if e.cluster.accelerator is Accelerator.cpu:
            if (
                not e.cluster.gpus_per_node
                or e.cluster.slurm.gpu_request is GpuRequest.none
                or report.visible_gpus is None
            ):
                continue
            seen, source = report.visible_gpus, "CUDA_VISIBLE_DEVICES"
            wanted = min(wanted, e.cluster.gpus_per_node)  # no more are asked of the scheduler
        elif report.nvml_gpus is None:
            yield Finding(
                "gpu_count", node, Verdict.UNKNOWN, report.nvml_problem, "is the NVIDIA driver installed there?"
            )
            continue
        else:
            seen, source = report.nvml_gpus, "NVML"
            if report.visible_gpus is not None and report.visible_gpus < seen:  # NVML ignores CUDA_VISIBLE_DEVICES
                seen, source = report.visible_gpus, "CUDA_VISIBLE_DEVICES"
        if seen < wanted:
            yield Finding("gpu_count", node, Verdict.FAIL, f"{seen} GPUs by {source}, {wanted} workers need one each")
        else:
            yield Finding("gpu_count", node, Verdict.PASS, f"{seen} GPUs by {source}")


def cpu_cores(e: Evidence) -> Iterator[Finding]:
    wanted = e.cluster.nproc_per_node * e.cluster.cpus_per_proc
    for node, report in e.reports.items():
        enough = report.cpus >= wanted
        yield Finding(
            "cpu_cores",
            node,
            Verdict.PASS if enough else Verdict.WARN,
            f"{report.cpus} cores usable" + ("" if enough else f", {wanted} asked for"),
            "" if enough else "workers will share cores; an inherited CPU binding, or a smaller machine",
        )


def run_directory(e: Evidence) -> Iterator[Finding]:
    for node, report in e.reports.items():
        if report.run_dir_problem:
            yield Finding(
                "run_directory",
                node,
                Verdict.FAIL,
                report.run_dir_problem,
                "cluster.shared_dir must be on storage that all nodes mount read-write",
            )
        else:
            yield Finding("run_directory", node, Verdict.PASS, "readable and writable")


def address(e: Evidence) -> Iterator[Finding]:
    for node, report in e.reports.items():
        if report.address is None:
            yield Finding("address", node, Verdict.FAIL, report.address_problem, "see cluster.interconnect.interface")
        elif report.address.startswith("127.") and len({r.host for r in e.reports.values()}) > 1:
            yield Finding(
                "address", node, Verdict.FAIL, f"{report.address} is loopback", "set cluster.interconnect.interface"
            )
        elif report.port is None:
            yield Finding("address", node, Verdict.FAIL, f"no free port on {report.address} among 200 tried")
        else:
            yield Finding("address", node, Verdict.PASS, f"{report.address}, port {report.port} free")


def clock(e: Evidence) -> Iterator[Finding]:
    """A node's clock must read a time between the start of the step and its end, on the conductor's clock."""
    begin, end = e.window
    for node, report in e.reports.items():
        skew = max(begin - report.time, report.time - end, 0.0)
        late = skew > e.preflight.max_clock_skew_s
        yield Finding(
            "clock",
            node,
            Verdict.WARN if late else Verdict.PASS,
            f"off by at least {skew:.1f} s" if skew else "within the step's own time",
            "logs and time-outs will not line up; check NTP" if late else "",
        )


def _version(report: NodeReport, name: str) -> str:
    return report.python if name == "python" else report.packages.get(name, "missing")


BASIC: dict[str, Check] = {
    "answered": answered,
    "versions": versions,
    "gpu_count": gpu_count,
    "cpu_cores": cpu_cores,
    "run_directory": run_directory,
    "address": address,
    "clock": clock,
}
