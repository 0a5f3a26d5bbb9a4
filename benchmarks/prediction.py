"""Predicted against published bus bandwidth: all-reduce tables of tests/corpus/nccl_tests that state their hardware.

    python benchmarks/prediction.py [--fit] [--plot FILE]

Errors are |predicted - published| / published, out of place. Goals: a median of at most 15 % from 64 MiB on and 30 %
from 1 to 64 MiB. ``--fit`` searches the parameters anew and prints them: latencies over rows up to 4 KiB, the rest over
those from 1 MiB on, which alone are judged. It also fits without each table in turn and predicts that one, which tells
what to expect of others: once with the latency of the table's own small rows (a network of which somebody has measured
a single number), once without anything of it. The hardware of each table is below, as its source
states it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
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
    "014": (1, 8, "v100_sxm2", IntraNode.nvlink_hybrid, InterNode.none, 0, 0),
    "015": (2, 8, "a100_sxm_40gb", SWITCH, InterNode.roce, 8, 200),
}
Point = tuple[str, Wiring, int, float]  # table, wiring, bytes, published busbw GB/s


def points(catalog: Catalog, sizes: Callable[[int], bool] = lambda size: size >= MIB) -> list[Point]:
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
                rows = [(r.size, r.size / r.out_of_place.time_us / 1e3) for r in table.rows if r.out_of_place.time_us]
                factor = 2 * (wiring.ranks - 1) / wiring.ranks
                found += [(file.name[:3], wiring, size, rate * factor) for size, rate in rows if sizes(size)]
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


def by_table(some: list[Point]) -> dict[str, list[Point]]:
    """So that a long table does not count more."""
    return {name: [p for p in some if p[0] == name] for name in sorted({p[0] for p in some})}


def loss(large: list[Point], small: list[Point], parameters: ModelParameters) -> float:
    """Mean over tables of the mean error (a factor two is as bad up as down) of bus bandwidths, and of latencies."""
    found = 0.0
    for some in (by_table(large), by_table(small)):
        if some:
            found += statistics.fmean(
                statistics.fmean(abs(math.log(predicted(w, s, parameters) / busbw)) for _, w, s, busbw in mine)
                for mine in some.values()
            )
    return found


# What is fitted: fields, and kinds of network that share a value. RDMA verbs are the same code in NCCL, EFA another.
VERBS = ("infiniband", "roce")
FITTED: list[tuple[str, tuple[str, ...]]] = [
    ("hop_in_node_us", ()),
    ("hop_between_us", VERBS),
    ("hop_between_us", ("efa",)),
    ("hop_between_us", ("efa_v2",)),
    ("chunk_in_node", ()),
    ("chunk_between", VERBS),
    ("chunk_between", ("efa", "efa_v2")),
]


def changed(parameters: ModelParameters, field: str, kinds: tuple[str, ...], factor: float) -> ModelParameters:
    now = getattr(parameters, field)
    return replace(
        parameters, **{field: {k: v * factor if k in kinds else v for k, v in now.items()} if kinds else now * factor}
    )


def fit(large: list[Point], small: list[Point], start: ModelParameters) -> ModelParameters:
    """Each parameter by itself, up and down by ever smaller factors, until nothing is gained."""
    best, least = start, loss(large, small, start)
    factor = 2.0
    while factor > 1.02:
        gained = False
        for field, kinds in FITTED:
            for change in (factor, 1 / factor):
                other = changed(best, field, kinds, change)
                if (found := loss(large, small, other)) < least - 1e-6:
                    best, least, gained = other, found, True
        if not gained:
            factor = factor**0.5
    return best


def without(name: str, large: list[Point], small: list[Point], start: ModelParameters) -> ModelParameters:
    """Fitted to all tables but one. A generation of EFA of which no other table is there is taken for the other one."""
    networks = {w.network for n, w, *_ in large + small if n != name}
    found = fit([p for p in large if p[0] != name], [p for p in small if p[0] != name], start)
    hops = dict(found.hop_between_us)
    for one, other in (("efa", "efa_v2"), ("efa_v2", "efa")):
        if one not in networks:
            hops[one] = hops[other]
    return replace(found, hop_between_us=hops)


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
    small = points(catalog, lambda size: size <= 4096)
    for name, mine in by_table(some).items():
        report(name, mine, parameters)
    report("all (goals: 15 and 30 %)", some, parameters)
    for name, mine in by_table(small).items():
        ratios = [busbw / predicted(wiring, size, parameters) for _, wiring, size, busbw in mine]
        print(f"{name}: latency predicted {statistics.median(ratios):.2f} times the published")
    if args.fit:
        found = fit(some, small, parameters)
        print({field: getattr(found, field) for field in dict(FITTED)})
        report("fitted to all", some, found)
        known: tuple[list[float], list[float]] = ([], [])
        unseen: tuple[list[float], list[float]] = ([], [])
        for name, mine in by_table(some).items():
            rest = [p for p in some if p[0] != name]
            for into, guess in (
                (known, fit(rest, small, parameters)),
                (unseen, without(name, some, small, parameters)),
            ):
                for whole, part in zip(into, errors(mine, guess), strict=True):
                    whole.extend(part)
        print(f"each table predicted by a fit without its rows from 1 MiB on: {medians(*known)}")
        print(f"each table predicted by a fit without it: {medians(*unseen)}")
    if args.plot:
        plot(some, parameters, args.plot)


def plot(some: list[Point], parameters: ModelParameters, file: Path) -> None:
    """Left: predicted against published. Right: both over the size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "clusterrun", "svg.fonttype": "none", "font.size": 9})
    figure, (scatter, curves) = pyplot.subplots(1, 2, figsize=(11, 5.2))
    ends = [4.0, 900.0]
    scatter.plot(ends, ends, color="grey", lw=1)
    for factor in (0.85, 1.15):
        scatter.plot(ends, [end * factor for end in ends], color="grey", lw=0.7, ls=":")
    for number, (name, mine) in enumerate(by_table(some).items()):
        wiring, colour = mine[0][1], f"C{number}"
        label = f"{name}: {wiring.nodes} x {wiring.per_node} {HARDWARE[name][2]}"
        guessed = [predicted(w, size, parameters) for _, w, size, _ in mine]
        published, sizes = [p[3] for p in mine], [p[2] / MIB for p in mine]
        large = [size >= 64 for size in sizes]
        for which, marker in ((True, "o"), (False, "^")):
            pairs = [(x, y) for x, y, is_large in zip(published, guessed, large, strict=True) if is_large is which]
            if pairs:
                scatter.loglog(*zip(*pairs, strict=True), marker, ms=4, color=colour)
        curves.loglog(sizes, published, "o", ms=3.5, color=colour, label=label)
        line = [MIB * 2 ** (power / 2) for power in range(71)]
        line = [size for size in line if min(sizes) <= size / MIB <= max(sizes)] or [sizes[0] * MIB]
        rates = [predicted(wiring, int(size), parameters) for size in line]
        curves.loglog([size / MIB for size in line], rates, color=colour, lw=1)
    scatter.set(xlabel="published bus bandwidth, GB/s", ylabel="predicted, GB/s", xlim=ends, ylim=ends)
    scatter.set_title("circles: from 64 MiB on; triangles: 1 to 64 MiB; dotted: 15 %", fontsize=9)
    curves.set(xlabel="size, MiB", ylabel="bus bandwidth, GB/s")
    curves.set_title("points: published; lines: predicted", fontsize=9)
    curves.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
