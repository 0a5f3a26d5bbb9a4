"""Random machines, printed as drivers print them and mangled as people paste them, must read back the same.

This is what keeps the reader honest: it can't know these texts. The printer below is independent of the reader.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterrun.topology import snapshot
from clusterrun.topology.classify import classify
from clusterrun.topology.document import document
from clusterrun.topology.model import Topology, TopologyError
from clusterrun.topology.text import parse_topologies

PCIE = ["PIX", "PXB", "PHB", "NODE", "SYS"]
#: The same examples each time, so that a run is a verdict; CLUSTERRUN_EXPLORE=1 looks for new ones.
FIXED = not os.environ.get("CLUSTERRUN_EXPLORE")
MODEST = settings(max_examples=120, deadline=None, derandomize=FIXED, suppress_health_check=[HealthCheck.too_slow])

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@dataclass(frozen=True)
class Machine:
    """What is printed; the truth to compare with."""

    names: list[str]  # columns, GPUs first
    gpus: int
    cells: list[list[str]]  # tokens, "X" on the diagonal
    cpus: list[str]
    numa: list[str]
    titles: int  # how many of the three affinity columns are printed
    devices: dict[str, str]  # NIC legend


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    gpus = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 8, 11, 16]))
    nics = draw(st.sampled_from([0, 0, 1, 2, 4, 10, 12]))
    size = gpus + nics
    style = draw(st.sampled_from(["NIC", "mlx5_", "mlx4_"]))
    names = [f"GPU{i}" for i in range(gpus)] + [f"{style}{i}" for i in range(nics)]
    vocabulary = draw(
        st.sampled_from(
            [["NV12"], ["NV18", "NV16"], ["NV1", "NV2", "SYS"], ["NV12", "NODE", "SYS"], PCIE, ["SYS"], ["PHB", "SOC"]]
        )
    )
    rng = random.Random(draw(st.integers(0, 2**32)))
    cells = [["X"] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1, size):
            token = rng.choice(vocabulary if j < gpus else PCIE)
            cells[i][j] = cells[j][i] = token
    titles = draw(st.sampled_from([0, 1, 2, 2, 3, 3, 3]))
    sockets = draw(st.sampled_from([1, 2, 4]))
    lists = ["0-31,64-95", "32-63,96-127", "128-159", "0,4,8,12"]
    node = [i * sockets // max(gpus, 1) for i in range(gpus)]
    empty = draw(st.sampled_from(["", "no numa", "no cpu", "none"])) if titles else "none"
    cpus = ["" if empty in ("no cpu", "none") else lists[node[i]] for i in range(gpus)]
    numa = [{"no numa": "N/A", "none": ""}.get(empty, str(node[i])) for i in range(gpus)]
    if titles < 2:
        numa = [""] * gpus
    devices = {f"NIC{i}": rng.choice([f"mlx5_{i}", f"mlx5_bond_{i}", f"rocep{i}s0f1"]) for i in range(nics)}
    return Machine(names, gpus, cells, cpus if titles else [""] * gpus, numa, titles, devices if style == "NIC" else {})


def rows_of(machine: Machine) -> list[list[str]]:
    """The cells that nvidia-smi prints, header first; one empty cell before the last of three affinity cells."""
    titles = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"][: machine.titles]
    rows = [["", *machine.names, *titles]]
    for at, name in enumerate(machine.names):
        cells = [" X " if token == "X" else token for token in machine.cells[at]]
        tail: list[str] = []
        if at < machine.gpus and machine.titles:
            tail = [machine.cpus[at], machine.numa[at], "", "N/A"]
            tail = tail[: machine.titles] if machine.titles < 3 else tail
        rows.append([name, *cells, *tail])
    return rows


def tabbed(machine: Machine) -> list[str]:
    return ["\t".join(row) for row in rows_of(machine)]


def expanded(machine: Machine) -> list[str]:
    return [line.expandtabs(8).rstrip() for line in tabbed(machine)]


def compact(machine: Machine) -> list[str]:
    """Columns re-aligned by hand with two blanks between them."""
    rows = [row if len(row) <= len(rows_of(machine)[0]) else [*row[:-2], row[-1]] for row in rows_of(machine)]
    width = [max(len(row[i].strip()) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    return ["  ".join(cell.strip().ljust(width[i]) for i, cell in enumerate(row)).rstrip() for row in rows]


def single(machine: Machine) -> list[str]:
    return [" ".join(" ".join(row).split()) for row in rows_of(machine)]


def markdown(machine: Machine) -> list[str]:
    rows = rows_of(machine)
    columns = len(rows[0])
    lines = []
    for row in rows:
        cells = [*row[:-2], row[-1]] if len(row) > columns else row
        lines.append("| " + " | ".join(cell.strip() for cell in [*cells, *[""] * (columns - len(cells))]) + " |")
    return [lines[0], "|" + "---|" * columns, *lines[1:]]


def glued(machine: Machine) -> list[str]:
    """All separators lost, as when a web page's table is copied."""
    return ["".join(cell.strip() for cell in row) for row in rows_of(machine)]


def legend_of(machine: Machine, short: bool) -> list[str]:
    lines = [] if short else LEGEND.split("\n")
    if machine.devices:
        lines += ["", "NIC Legend:", "", *(f"  {column}: {device}" for column, device in machine.devices.items())]
    return lines


def escaped(lines: list[str], how: str) -> list[str]:
    head = lines[0]
    at = head.index("GPU0")
    escape = {"esc": "\x1b[4m", "bare": "[4m", "caret": "^[[4m"}[how]
    end = escape.replace("4m", "0m")
    return [head[:at] + escape + head[at:] + end, *lines[1:]]


def wrapped(lines: list[str], width: int) -> list[str]:
    return [line[at : at + width] for line in lines for at in range(0, max(len(line), 1), width)]


PREFIXES = ["    ", "> ", "\t", "| ", "0: ", "node17: ", "[1,0]<stdout>: ", "+", "node1 | "]
STAMPS = ["2024-09-23T09:34:37.123456789Z stdout F ", "[2024-09-23 09:34:37] INFO ", "Sep  3 10:00:00 gpu7 job[812]: "]


@st.composite
def pasted(draw: st.DrawFn, machine: Machine) -> tuple[list[str], bool, bool]:
    """Lines of a paste; whether affinity cells can be told apart in it; whether the NIC legend is in it."""
    layout = draw(st.sampled_from([tabbed, tabbed, expanded, expanded, compact, single, markdown, glued]))
    lines = layout(machine)
    exact = layout in (tabbed, expanded, compact, markdown)
    if layout is expanded and draw(st.integers(0, 3)) == 0:
        lines = wrapped(lines, draw(st.sampled_from([80, 100, 132])))
        exact = False
    elif layout not in (markdown, glued) and draw(st.booleans()):
        lines = escaped(lines, draw(st.sampled_from(["esc", "bare", "caret"])))
    with_legend = draw(st.booleans())
    body = lines + (legend_of(machine, draw(st.booleans())) if with_legend else [])
    noise = draw(st.sampled_from(["none", "prefix", "stamp", "fence", "prompt", "blanks"]))
    if noise == "prefix":
        prefix = draw(st.sampled_from(PREFIXES))
        body = [prefix + line for line in body]
    elif noise == "stamp" and exact:
        stamp = draw(st.sampled_from(STAMPS))
        body = [f"{stamp}{line}" for line in body]
    elif noise == "fence":
        body = ["### topology", "```bash", *body, "```", "</details>"]
    elif noise == "prompt":
        body = ["[root@gpu07 ~]# nvidia-smi topo -m", *body, "[root@gpu07 ~]# nvidia-smi -L", "GPU 0: NVIDIA H100 80GB"]
    elif noise == "blanks":
        body = [line + " " * 60 if line else line for line in body]
    if draw(st.booleans()) and layout is not tabbed:
        body = [line.replace("    ", "\u00a0\u00a0 \u2003") for line in body]
    return body, exact, with_legend


def tokens(topology: Topology) -> list[list[str | None]]:
    """The whole matrix as read, GPUs first."""
    size = len(topology.gpus)
    rows: list[list[str | None]] = []
    for i in range(size):
        row = [None if link is None else str(link) for link in topology.links[i]]
        rows.append(row + [None if nic.links[i] is None else str(nic.links[i]) for nic in topology.nics])
    for nic in topology.nics:
        rows.append([None if link is None else str(link) for link in (*nic.links, *nic.nic_links)])
    return rows


def check(read: Topology, machine: Machine, exact: bool, with_legend: bool) -> None:
    assert tokens(read) == machine.cells
    assert read.complete, read.missing
    assert [gpu.name for gpu in read.gpus] == machine.names[: machine.gpus]
    assert [nic.name for nic in read.nics] == machine.names[machine.gpus :]
    for at, gpu in enumerate(read.gpus):
        numa = (int(machine.numa[at]),) if machine.numa[at].isdigit() else ()
        if exact:
            assert (gpu.cpu_affinity or "", gpu.numa) == (machine.cpus[at], numa)
        else:  # where cells can't be told apart, nothing may be made up
            assert gpu.cpu_affinity in (None, machine.cpus[at])
            assert gpu.numa in ((), numa)
    if with_legend and machine.devices:
        assert {nic.name: nic.device for nic in read.nics} == machine.devices


@MODEST
@given(st.data())
def test_reads_back(data: st.DataObject) -> None:
    machine = data.draw(machines())
    lines, exact, with_legend = data.draw(pasted(machine))
    ends = data.draw(st.sampled_from(["\n", "\r\n"]))
    encoded = ends.join(lines).encode(data.draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16"])))
    (read,) = parse_topologies(encoded)
    check(read, machine, exact, with_legend)
    assert snapshot.loads(snapshot.dumps([read])) == [read]


@MODEST
@given(st.data())
def test_several_machines(data: st.DataObject) -> None:
    """One below the other, or line by line as srun -l and pdsh mix them."""
    parts = data.draw(st.lists(machines(), min_size=2, max_size=4))
    layout = data.draw(st.sampled_from([tabbed, expanded]))
    texts = [layout(part) for part in parts]
    mixed = data.draw(st.sampled_from(["below", "headings", "labelled", "interleaved"]))
    if mixed == "below":
        lines = [line for text in texts for line in [*text, ""]]
    elif mixed == "headings":
        lines = [line for at, text in enumerate(texts) for line in [f"--- node{at} ---", *text, *LEGEND.split("\n")]]
    else:
        labelled = [[f"node{at}: {line}" for line in text] for at, text in enumerate(texts)]
        lines = [line for text in labelled for line in text]
        if mixed == "interleaved":
            lines = []
            rng = random.Random(data.draw(st.integers(0, 2**32)))
            while any(labelled):
                chosen = rng.choice([text for text in labelled if text])
                lines.append(chosen.pop(0))
    read = parse_topologies("\n".join(lines))
    if mixed == "interleaved":  # in the order in which the headers came
        read.sort(key=lambda topology: topology.name or "")
    assert [tokens(topology) for topology in read] == [part.cells for part in parts]
    assert all(topology.complete for topology in read)
    if mixed != "below":
        assert [topology.name for topology in read] == [f"node{at}" for at in range(len(parts))]


@MODEST
@given(st.data())
def test_cut_anywhere(data: st.DataObject) -> None:
    """A cut paste never gives a wrong link, and says that something is missing when it is."""
    machine = data.draw(machines())
    text = "\n".join(data.draw(st.sampled_from([tabbed, expanded, compact]))(machine))
    last_cell = text.rindex("X")
    cut = data.draw(st.integers(0, len(text)))
    try:
        (read,) = parse_topologies(text[:cut])
    except TopologyError:
        assert text[:cut].count("\n") <= 1
        return
    wanted = {(a, b): machine.cells[i][j] for i, a in enumerate(machine.names) for j, b in enumerate(machine.names)}
    names = [*(gpu.name for gpu in read.gpus), *(nic.name for nic in read.nics)]
    for i, row in enumerate(tokens(read)):
        for j, token in enumerate(row):
            assert token is None or token == wanted.get((names[i], names[j]), token)
    if cut <= last_cell and len(machine.names) > 1:
        assert not read.complete
        assert document([read])["machines"][0]["missing"]
    assert classify(read).kind  # any incomplete matrix has a class


@MODEST
@given(st.data())
def test_lost_lines(data: st.DataObject) -> None:
    """Rows that are missing anywhere are named, their mirror cells answer, and nothing is made up."""
    machine = data.draw(machines())
    lines = tabbed(machine)
    gone = data.draw(st.sets(st.integers(1, len(lines) - 1), min_size=1, max_size=max(1, len(lines) - 2)))
    kept = [line for at, line in enumerate(lines) if at not in gone]
    if len(kept) < 2:
        return
    (read,) = parse_topologies("\n".join(kept))
    for i, row in enumerate(tokens(read)):
        for j, token in enumerate(row):
            lost = i != j and i + 1 in gone and j + 1 in gone
            true = machine.cells[i][j]
            # A last line that ends in NV1 may have been NV12: then the cell is unknown too.
            cut = len(true) == 3 and true.startswith("NV") and len(machine.names) - 1 in (i, j)
            assert token == (None if lost else true) or (cut and token is None)
    assert not read.complete


@MODEST
@given(st.data())
def test_a_flipped_cell_is_noticed(data: st.DataObject) -> None:
    machine = replace(data.draw(machines()), titles=0)
    if machine.gpus < 2:
        return
    i, j = data.draw(st.sampled_from([(i, j) for i in range(machine.gpus) for j in range(machine.gpus) if i != j]))
    cells = [list(row) for row in machine.cells]
    cells[i][j] = "NV6" if cells[i][j] != "NV6" else "SYS"
    (read,) = parse_topologies("\n".join(tabbed(replace(machine, cells=cells))))
    assert not read.complete
    assert any(f"GPU{min(i, j)}-GPU{max(i, j)}" in phrase for phrase in read.missing)


@settings(MODEST, max_examples=200)
@given(st.text(alphabet=st.sampled_from(list("GPUNICX V0123\t\n-,:|NODESYSPIXmlx5_ Affinity\x1b[m")), max_size=400))
def test_garbage_never_crashes(text: str) -> None:
    said = "one line"
    try:
        for read in parse_topologies(text):
            document([read])
    except TopologyError as error:
        said = str(error)
    assert "\n" not in said
