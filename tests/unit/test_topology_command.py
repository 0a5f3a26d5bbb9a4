"""`clusterrun topo`: what it prints, writes and returns."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from clusterrun.process import run
from clusterrun.report import topology_table
from clusterrun.topology import command, snapshot
from clusterrun.topology.model import Topology, TopologyError
from clusterrun.topology.text import parse_topologies

CORPUS = Path(__file__).parents[1] / "corpus" / "topo"
PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tSYS\tSYS\tSYS\t0-31\t0
GPU1\tNV12\t X \tSYS\tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV12\tPHB\t32-63\t1
GPU3\tSYS\tSYS\tNV12\t X \tNODE\t32-63\t1
"""


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_standard_input_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(monkeypatch, PAIRS.encode())
    assert topology_table.main(["-", "--json"]) == 0
    (machine,) = json.loads(capsys.readouterr().out)["machines"]
    assert machine["links"][0] == ["X", "NV12", "SYS", "SYS"]
    assert (machine["class"], machine["worst_link"], machine["best_link"]) == ("nvlink_pairs", "SYS", "NV12")
    assert (machine["gpus"], machine["nics"], machine["numa_nodes"]) == (4, 1, [0, 1])
    assert (machine["complete"], machine["missing"]) == (False, ["row NIC0"])
    assert machine["gpus_without_near_nic"] == [0, 1, 2, 3]


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(monkeypatch, PAIRS.encode())
    assert topology_table.main(["-"]) == 0
    out = capsys.readouterr().out
    assert "nvlink_pairs" in out
    assert "worst link SYS" in out
    assert "advice: " in out
    assert "incomplete, not known: row NIC0" in out


def test_worse_links_stand_out() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=120)
    topology_table.print_topologies(parse_topologies(PAIRS), console)
    file = console.file
    assert isinstance(file, io.StringIO)
    text = file.getvalue()
    assert "\x1b[1;31mSYS" in text
    assert "\x1b[32mNV12" in text


def test_a_narrow_terminal_loses_no_cell() -> None:
    file = io.StringIO()
    topology_table.print_topologies(parse_topologies(PAIRS), Console(file=file, width=30))
    row = next(line for line in file.getvalue().splitlines() if line.startswith("GPU2"))
    assert row.split() == ["GPU2", "SYS", "SYS", "X", "NV12", "PHB", "32-63", "1"]


def test_not_a_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "error.txt"
    path.write_text("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", encoding="utf-8")
    assert topology_table.main([str(path), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"clusterrun topo: {path}: not a topology: nvidia-smi could not reach the driver")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_unreadable_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert topology_table.main([str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_this_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty = Topology((), (), source="sysfs", notes=("no NVIDIA driver on this machine",), host_numa=(0,))
    monkeypatch.setattr(command, "read_node", lambda **_: empty)
    assert topology_table.main([]) == 0
    assert "no GPU on this machine" in capsys.readouterr().out
    record = tmp_path / "node.json"
    assert topology_table.main(["--json", "--record", str(record)]) == 0
    (machine,) = json.loads(capsys.readouterr().out)["machines"]
    assert (machine["gpus"], machine["class"], machine["complete"]) == (0, "none", True)
    assert snapshot.loads(record.read_text()) == [empty]
    assert [path.name for path in tmp_path.iterdir()] == ["node.json"]


def test_record_into_nowhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(monkeypatch, PAIRS.encode())
    assert topology_table.main(["-", "--record", "/nonexistent/x.json"]) == 2
    assert "can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        '{"clusterrun_topology": 1, "machines": [',
        '{"clusterrun_topology": 9, "machines": [{}]}',
        '{"clusterrun_topology": 1, "machines": []}',
        '{"clusterrun_topology": 1, "machines": [{"gpus": 3}]}',
        '{"clusterrun_topology": 1, "machines": [{"gpus": [{"name": "GPU0", "index": 0}], "links": [["ZZ"]]}]}',
        '{"clusterrun_topology": 1, "machines": [{"gpus": [{"name": "GPU0", "index": 0}], "links": []}]}',
    ],
)
def test_broken_snapshots(text: str) -> None:
    with pytest.raises(TopologyError):
        snapshot.loads(text)


def test_importing_asks_nothing() -> None:
    """A login node without nvidia-ml-py must be able to import everything."""
    code = (
        "import sys, clusterrun.topology.command, clusterrun.topology.nvml; print({'pynvml', 'torch'} & {*sys.modules})"
    )
    assert run([sys.executable, "-c", code], timeout_s=30).strip() == "set()"


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_draws_the_matrix(ending: str, magic: bytes, tmp_path: Path) -> None:
    source = CORPUS / "004-8xV100-sxm2-hybrid-cube-2mlx.txt"
    picture = tmp_path / f"wiring.{ending}"
    assert topology_table.main([str(source), "--plot", str(picture)]) == 0
    content = picture.read_bytes()
    assert content.startswith(magic)
    assert len(content) > 5_000


def test_plot_refuses_other_endings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = CORPUS / "004-8xV100-sxm2-hybrid-cube-2mlx.txt"
    assert topology_table.main([str(source), "--plot", str(tmp_path / "x.gif")]) == 2
    assert capsys.readouterr().err.strip().endswith("the ending must be .png or .svg")
