"""Kinds of pastes that the corpus does not have, one small case each."""

from __future__ import annotations

import json

import pytest

from clusterrun.topology.document import document
from clusterrun.topology.model import Topology, TopologyError
from clusterrun.topology.text import parse_topologies

FOUR = [
    "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID",
    "GPU0\t X \tNV12\tSYS\tSYS\tPIX\t0-31\t0\t\tN/A",
    "GPU1\tNV12\t X \tSYS\tSYS\tNODE\t0-31\t0\t\tN/A",
    "GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A",
    "GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A",
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \t\t\t\t",
]
LINKS = [
    ["X", "NV12", "SYS", "SYS"],
    ["NV12", "X", "SYS", "SYS"],
    ["SYS", "SYS", "X", "NV12"],
    ["SYS", "SYS", "NV12", "X"],
]


def one(text: str | bytes) -> Topology:
    (machine,) = parse_topologies(text)
    return machine


def links(machine: Topology) -> list[list[str | None]]:
    return [[None if link is None else str(link) for link in row] for row in machine.links]


def check_four(machine: Topology, affinity: bool = True) -> None:
    assert links(machine) == LINKS
    assert [str(link) for link in machine.nics[0].links] == ["PIX", "NODE", "SYS", "SYS"]
    assert machine.complete, machine.missing
    if affinity:
        assert [gpu.cpu_affinity for gpu in machine.gpus] == ["0-31", "0-31", "32-63", "32-63"]
        assert [gpu.numa for gpu in machine.gpus] == [(0,), (0,), (1,), (1,)]


WRAPPERS = {
    "plain": "\n".join(FOUR),
    "line ends lost": "Python 3.10 GPU Topology: "
    + " ".join(" ".join(FOUR).split())
    + " Legend: X = Self SYS = Connection",
    "json string": json.dumps({"env": "x", "topology": "\n".join(FOUR) + "\n\nLegend:\n"}),
    "python list": repr([line + "\n" for line in FOUR]),
    "docker json log": "\n".join(json.dumps({"log": line + "\n", "stream": "stdout", "time": "T"}) for line in FOUR),
    "echo in a script": "\n".join(f'  echo "{line.replace(chr(9), " ")}"' for line in FOUR),
    "html table": "<table>"
    + "".join("<tr>" + "".join(f"<td>{c.strip()}</td>" for c in line.split("\t")) + "</tr>" for line in FOUR)
    + "</table>",
    "html pre": "<pre>" + "<br>".join(FOUR).replace("\t", "&nbsp;&nbsp;  &#9;") + "</pre>",
    "box drawing": "\n".join("│ " + " │ ".join(c.strip() for c in line.split("\t")) + " │" for line in FOUR),
    "terminal recording": "\n".join(line.expandtabs(8).replace("        ", "\x1b[8C") for line in FOUR),
    "line numbers": "\n".join(f"{at:6}\t{line}" for at, line in enumerate(FOUR, 12)),
    "grep -n": "\n".join(f"{at}:{line}" for at, line in enumerate(FOUR, 12)),
    "diff": "\n".join("+" + line for line in FOUR),
    "comments": "\n".join("# " + line for line in FOUR),
    "kubectl --prefix": "\n".join(f"[pod/nccl-worker-0/main] {line}" for line in FOUR),
    "systemd": "\n".join(f"Dec 02 09:12:12 gpu07 topo.sh[4711]: {line}" for line in FOUR),
    "blank lines between": "\n\n".join(FOUR),
    "old mac line ends": "\r".join(FOUR),
    "next-line characters": "\u2028".join(FOUR),
    "header glued": FOUR[0].replace("\t", "") + "\n" + "\n".join(line.replace("\t", "    ") for line in FOUR[1:]),
    "markdown escapes": "\n".join(FOUR).replace("NIC0", "mlx5\\_0"),
    "pager repeats the header": "\n".join([*FOUR[:3], "", FOUR[0], *FOUR[3:]]),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers(kind: str) -> None:
    check_four(one(WRAPPERS[kind]), affinity=kind not in ("line ends lost", "header glued"))


def test_utf16_with_and_without_mark() -> None:
    check_four(one("\n".join(FOUR).encode("utf-16")))
    check_four(one("\n".join(FOUR).encode("utf-16-le")))


def test_glued_cells_are_split_where_one_reading_is_left() -> None:
    text = "GPU0GPU1GPU2CPU AffinityNUMA AffinityGPU NUMA ID\nGPU0XNODENV120-310N/A\nGPU1NODEXPIX0-310N/A\n"
    machine = one(text + "GPU2NV12PIXX0-310N/A")
    assert links(machine) == [["X", "NODE", "NV12"], ["NODE", "X", "PIX"], ["NV12", "PIX", "X"]]
    assert [gpu.cpu_affinity for gpu in machine.gpus] == [None] * 3  # "0-310" may be 0-31 and 0, or 0-310


def test_glued_cell_with_two_readings_is_unknown() -> None:
    machine = one("\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tNV120-23\n")  # NV12 and 0-23, or NV1 and 20-23
    assert links(machine)[0] == ["X", None]
    assert not machine.complete


def test_rows_without_their_header() -> None:
    machine = one("GPU0 X SYS 0,2,4,6 0\nGPU1 SYS X 1,3,5,7 1\n")
    assert links(machine) == [["X", "SYS"], ["SYS", "X"]]
    assert "the header line" in machine.missing


def test_header_without_rows_is_incomplete() -> None:
    machine = one("$ nvidia-smi topo -m\n" + FOUR[0] + "\n")
    (answer,) = document([machine])["machines"]
    assert (answer["gpus"], answer["class"], answer["worst_link"], answer["complete"]) == (4, "unknown", None, False)


def test_screen_cut_on_the_right() -> None:
    lines = [line.expandtabs(8)[:36] for line in FOUR]
    machine = one("\n".join(lines))
    known = {(i, j): link for i, row in enumerate(links(machine)) for j, link in enumerate(row) if link}
    assert len(machine.gpus) == 4
    assert all(LINKS[i][j] == link for (i, j), link in known.items())
    assert not machine.complete


def test_lines_replaced_by_dots() -> None:
    machine = one("\n".join([*FOUR[:2], "...", FOUR[4], "…"]))
    assert links(machine)[1] == ["NV12", "X", None, "SYS"]
    assert machine.missing == ("rows GPU1-GPU2, NIC0",)


def test_empty_and_unknown_cells() -> None:
    machine = one("\tGPU0\tGPU1\tGPU2\nGPU0\t X \t\tSYS\nGPU1\t\t X \tN/A\nGPU2\tSYS\tN/A\t X \n")
    assert links(machine) == [["X", None, "SYS"], [None, "X", None], ["SYS", None, "X"]]
    assert "GPU0-GPU1, GPU1-GPU2" in machine.missing[0]


def test_an_x_in_the_wrong_place_is_not_used() -> None:
    lines = [*FOUR[:2], FOUR[2].replace("NV12\t X ", " X \tNV12"), *FOUR[3:]]
    machine = one("\n".join(lines))
    assert links(machine)[1] == LINKS[1]  # from the mirror cells
    assert any("GPU1" in phrase for phrase in machine.missing)


def test_second_machine_without_its_header() -> None:
    other = [line.replace("NV12", "PHB") for line in FOUR[1:]]
    first, second = parse_topologies("\n".join([*FOUR, "", "node2:", *other]))
    check_four(first)
    assert links(second)[0] == ["X", "PHB", "SYS", "SYS"]


def test_the_same_paste_before_and_after() -> None:
    after = [line.replace("NV12", "NV8 ") for line in FOUR]
    first, second = parse_topologies("\n".join(["-" + line for line in FOUR] + ["+" + line for line in after]))
    assert (links(first)[0][1], links(second)[0][1]) == ("NV12", "NV8")


def test_names_of_machines() -> None:
    blocks = [
        "----------------",
        "node[1-4]",
        "----------------",
        *FOUR,
        "",
        "----------------",
        "node5",
        "----------------",
    ]
    assert [machine.name for machine in parse_topologies("\n".join([*blocks, *FOUR]))] == ["node[1-4]", "node5"]
    prompts = ["root@gpu01:~# nvidia-smi topo -m", *FOUR, "root@gpu02:~# nvidia-smi topo -m", *FOUR]
    assert [machine.name for machine in parse_topologies("\n".join(prompts))] == ["gpu01", "gpu02"]


def test_legends_of_several_machines() -> None:
    legend = ["", "NIC Legend:", "", "  NIC0: {}", ""]
    text = [*FOUR, *(line.format("mlx5_2") for line in legend), *FOUR, *(line.format("mlx5_bond_0") for line in legend)]
    assert [machine.nics[0].device for machine in parse_topologies("\n".join(text))] == ["mlx5_2", "mlx5_bond_0"]


def test_nics_that_the_driver_did_not_show() -> None:
    machine = one("\n".join([*FOUR, "76 NICs found in the topology, only displaying 56"]))
    assert machine.missing == ("20 NICs that nvidia-smi did not display",)


def test_a_mail_client_wrapped_the_lines() -> None:
    text = [
        "> \tGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA",
        "> Affinity",
        "> GPU0\t X \tNV1\tNODE\t0-19,40-59",
        "> 0",
        "> GPU1\tNV1\t X \tSYS\t20-39,60-79",
        "> 1",
        "> mlx5_0\tNODE\tSYS\t X ",
        "> ",
        "> Thanks for looking into it",
    ]
    machine = one("\n".join(text))
    assert links(machine) == [["X", "NV1"], ["NV1", "X"]]
    assert [(gpu.cpu_affinity, gpu.numa) for gpu in machine.gpus] == [("0-19,40-59", (0,)), ("20-39,60-79", (1,))]
    assert (machine.complete, machine.name) == (True, None)


def test_a_failing_gpu_prints_errors_in_its_cells() -> None:
    machine = one("\tGPU0\tGPU1\tGPU2\nGPU0\t X \tERR!\tPHB\nGPU1\tERR!\t X \tERR!\nGPU2\tPHB\tERR!\t X \n")
    assert links(machine) == [["X", None, "PHB"], [None, "X", None], ["PHB", None, "X"]]
    assert "GPU0-GPU1, GPU1-GPU2" in machine.missing[0]


def test_a_cpu_column_of_a_hand_made_table_is_no_nic() -> None:
    machine = one("     GPU0 GPU1 CPU\nGPU0  X   NV1  PHB\nGPU1 NV1   X   PHB\nCPU  PHB  PHB   X\n")
    assert (links(machine), machine.nics) == ([["X", "NV1"], ["NV1", "X"]], ())


def test_rows_wider_than_the_header_say_so() -> None:
    machine = one("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\tPIX\t0-3\nGPU1\tNV4\t X \tSYS\t0-3\n")
    assert links(machine) == [["X", "NV4"], ["NV4", "X"]]
    assert "the name of a column" in machine.missing[0]


def test_a_row_from_the_next_machine_does_not_fill_a_gap_before_it() -> None:
    first = [*FOUR[:4]]  # GPU3 and NIC0 are cut off
    second = [FOUR[0], FOUR[1], FOUR[2], FOUR[4], FOUR[5]]  # GPU2 is lost
    one_, other = parse_topologies("\n".join([*first, "", *second]))
    assert one_.missing == ("rows GPU3, NIC0",)
    assert other.missing == ("row GPU2",)


def test_numa_of_grace() -> None:
    machine = one("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-71\t0,2-4\t\t1\n")
    assert (machine.gpus[0].numa, machine.gpus[0].gpu_numa_id) == ((0, 2, 3, 4), 1)


def test_prose_about_links_is_not_read_as_rows() -> None:
    prose = "GPU0 SYS to the NIC, and GPU1 X is fine.\nOnly GPU0 GPU1 are used; NIC0 is SYS from every GPU.\n"
    check_four(one(prose + "\n".join(FOUR) + "\n" + prose))
    with pytest.raises(TopologyError):
        parse_topologies("We saw GPU0 GPU1 over SYS, then GPU0 was lost.")


P2P = " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        (" \n\t\n", "empty"),
        (P2P, "peer-to-peer"),
        (P2P.replace("OK\t", "CNS\t"), "peer-to-peer"),
        ("$ nvidia-smi topo -p2p r\n \tGPU0\t\n GPU0\tX\t\n", "not a topology"),
        ("bash: nvidia-smi: command not found\n", "not found"),
        ("No devices were found\n", "no GPU"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "NVML did not start"),
        ("Unable to determine the device handle for GPU0000:41:00.0: GPU is lost.\n", "could not be reached"),
        ("GPU0   0   40\nGPU1  40    0\nGPU0 GPU1 XGMI\n===== ROCm System Management Interface =====", "AMD"),
        ("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n", "no line with GPU0"),
        ("The GPUs that have an affinity with CPU 48 are:\n0, 1\n", "no line with GPU0"),
        ("Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n", "no line with GPU0"),
        ("\x00\x01\x02\xff" * 30, "not a topology"),
        ('{"machines": []}', "no line with GPU0"),
    ],
)
def test_not_topologies(text: str, word: str) -> None:
    with pytest.raises(TopologyError, match="not a topology") as caught:
        parse_topologies(text)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_peer_matrix_beside_a_topology_is_left_aside() -> None:
    check_four(one("\n".join([*FOUR, "", "$ nvidia-smi topo -p2p r", P2P])))
    check_four(one("\n".join(["$ nvidia-smi topo -p2p r", P2P, "$ nvidia-smi topo -m", *FOUR])))


def test_a_wrong_file_is_refused_fast() -> None:
    with pytest.raises(TopologyError, match="characters"):
        parse_topologies("GPU0 X\n" * 2_000_000)
