"""Predicted against published bus bandwidth: all-reduce tables of tests/corpus/nccl_tests that state their hardware.

    python benchmarks/prediction.py [--fit] [--plot FILE]

Errors are |predicted - published| / published, out of place. Goals: a median of at most 15 % from 64 MiB on and 30 %
from 1 to 64 MiB. ``--fit`` searches the parameters anew and prints them; it also fits without each table in turn and
predicts that one, which tells what to expect of tables that were not seen. The hardware of each table is below, as its
source states it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from clusterrun.config.schema import Accelerator, ClusterConfig, InterconnectConfig, InterNode, IntraNode
from clusterrun.cost.catalog import Catalog, ModelParameters
from clusterrun.cost.collectives import all_reduce
from clusterrun.cost.wiring import Unknown, Wiring, declared
from clusterrun.measure.nccl_tests import Status, read

CORPUS = Path(__file__).parents[1] / "tests" / "corpus" / "nccl_tests"
MIB = 2**20
SWITCH, PCIE = IntraNode.nvswitch, IntraNode.pcie
# number of the file: nodes, GPUs per node, catalogue name, wiring in a node, network, ports per node, Gbit/s of a port
HARDWARE: dict[str, tuple[int, int, str, IntraNode, InterNode, int, float]] = {
    "001": (2, 8, "a100_sxm_80gb", SWITCH, InterNode.efa, 4, 100),
    "002": (2, 8, "h100_sxm", SWITCH, InterNode.efa, 32, 100),
    "005": (16, 8, "h200_sxm", SWITCH, InterNode.efa, 16, 200),
    "006": (2, 8, "a100_sxm_40gb", SWITCH, InterNode.roce, 8, 200),
    "007": (2, 8, "mi300x", IntraNode.nvlink_mesh, InterNode.roce, 8, 400),
    "010": (2, 1, "rtx_3090", PCIE, InterNode.roce, 1, 100),
    "013": (2, 64, "gb200", SWITCH, InterNode.infiniband, 64, 400),  # a node here is a rack's NVLink domain
    "014": (1, 8, "v100_sxm2", IntraNode.nvlink_mesh, InterNode.none, 0, 0),
    "015": (2, 8, "a100_sxm_40gb", SWITCH, InterNode.roce, 8, 200),
}
Point = tuple[str, Wiring, int, float]  # table, wiring, bytes, published busbw GB/s


def points(catalog: Catalog) -> list[Point]:
    found: list[Point] = []
    for file in sorted(CORPUS.glob("*.txt")):
        if file.name[:3] not in HARDWARE:
            continue
        nodes, per_node, gpu, intra, network, ports, rate = HARDWARE[file.name[:3]]
        wires = InterconnectConfig(
            intra_node=intra, inter_node=network, nics_per_node=ports or None, nic_gbit_per_s=rate or None
        )
        wiring = declared(
            ClusterConfig(
                accelerator=Accelerator.cuda, nodes=nodes, nproc_per_node=per_node, gpu_model=gpu, interconnect=wires
            ),
            catalog,
        )
        assert not isinstance(wiring, Unknown), wiring
        for table in read(file.read_text(encoding="utf-8", errors="replace")):
            if table.status is Status.OK:
                rows = [(row.size, row.out_of_place.busbw) for row in table.rows]
                found += [(file.name[:3], wiring, size, busbw) for size, busbw in rows if size >= MIB and busbw > 0]
    return found


def predicted(wiring: Wiring, size: int, parameters: ModelParameters) -> float:
    """Bus bandwidth, GB/s."""
    n = wiring.ranks
    return size / all_reduce(size, wiring, parameters).seconds / 1e9 * 2 * (n - 1) / n


def errors(some: Iterable[Point], parameters: ModelParameters) -> tuple[list[float], list[float]]:
    """Relative errors from 64 MiB on, and below."""
    large: list[float] = []
    middle: list[float] = []
    for _, wiring, size, busbw in some:
        (large if size >= 64 * MIB else middle).append(abs(predicted(wiring, size, parameters) / busbw - 1))
    return large, middle


def loss(some: list[Point], parameters: ModelParameters) -> float:
    """Mean over tables of the mean error, so that a long table does not count more."""
    tables = {name for name, *_ in some}
    return statistics.fmean(
        statistics.fmean([*large, *middle])
        for large, middle in (errors([p for p in some if p[0] == name], parameters) for name in tables)
    )


def fit(some: list[Point], start: ModelParameters) -> ModelParameters:
    """Each parameter by itself, up and down by ever smaller factors, until nothing is gained."""
    best, least = start, loss(some, start)
    names = ["pipeline_us", "base_us", "hop_in_node_us", *(f"hop:{kind}" for kind in start.hop_between_us)]
    factor = 2.0
    while factor > 1.02:
        gained = False
        for name in names:
            for change in (factor, 1 / factor):
                if name.startswith("hop:"):
                    hops = dict(best.hop_between_us)
                    hops[name[4:]] = min(100.0, max(1.0, hops[name[4:]] * change))
                    other = replace(best, hop_between_us=hops)
                else:
                    other = replace(best, **{name: min(200.0, max(0.1, getattr(best, name) * change))})
                if loss(some, other) < least - 1e-6:
                    best, least, gained = other, loss(some, other), True
        if not gained:
            factor = factor**0.5
    return best


def report(title: str, some: list[Point], parameters: ModelParameters) -> None:
    print(f"{title}: {medians(*errors(some, parameters))}")


def medians(large: list[float], middle: list[float]) -> str:
    parts = [("from 64 MiB on", large), ("from 1 to 64 MiB", middle)]
    said = [f"{100 * statistics.median(e):.1f} % of {len(e)} sizes {where}" for where, e in parts if e]
    return "median error " + ", ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    catalog = Catalog()
    some, parameters = points(catalog), catalog.parameters()
    for name in sorted({name for name, *_ in some}):
        report(name, [p for p in some if p[0] == name], parameters)
    report("all (goals: 15 and 30 %)", some, parameters)
    if args.fit:
        found = fit(some, parameters)
        print(found)
        report("fitted to all", some, found)
        large: list[float] = []
        middle: list[float] = []
        for name in sorted({name for name, *_ in some}):
            without = fit([p for p in some if p[0] != name], parameters)
            one = errors([p for p in some if p[0] == name], without)
            large, middle = large + one[0], middle + one[1]
        print(f"each table predicted by a fit without it: {medians(large, middle)}")
    if args.plot:
        plot(some, parameters, args.plot)


def plot(some: list[Point], parameters: ModelParameters, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    for name in sorted({name for name, *_ in some}):
        mine = [p for p in some if p[0] == name]
        wiring = mine[0][1]
        label = f"{HARDWARE[name][2]}, {wiring.nodes} x {wiring.per_node}"
        axes.loglog([p[3] for p in mine], [predicted(p[1], p[2], parameters) for p in mine], "o", ms=4, label=label)
    ends = [1, 800]
    axes.plot(ends, ends, color="grey", lw=1)
    axes.set_xlabel("published bus bandwidth, GB/s")
    axes.set_ylabel("predicted, GB/s")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
