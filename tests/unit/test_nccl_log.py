"""Reading NCCL's logs: real lines of 2.3 to 2.30 (sources beside them), glued, cut, and what follows from them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterrun.config import frozen
from clusterrun.config.schema import (
    Accelerator,
    ClusterConfig,
    InterconnectConfig,
    InterNode,
    IntraNode,
    Precision,
    RunConfig,
    TrainConfig,
)
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.prediction import predict
from clusterrun.ledger import Ending, Ledger
from clusterrun.nccl import findings
from clusterrun.nccl.findings import Fallback, unclear, used
from clusterrun.nccl.log import NcclLog, read, transport
from clusterrun.report.nccl_used import nccl_lines
from clusterrun.rundir import AttemptDir, RunDir
from conftest import Ended

# NVIDIA/nccl#1189 (2 nodes of H20) and #1357
GOOD = """\
H20-GPU-06:4015539:4015652 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 01/0 : 3[1] -> 1[1] [send] via NET/IB/2/GDRDMA
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
qh100-gpu20:39633:39689 [4] NCCL INFO NVLS multicast support is available on dev 4
qh100-gpu20:39633:39689 [4] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_2:1/IB [RO]; OOB ibs85f0:192.168.1.10<0>
""".splitlines()
# NVIDIA/nccl#634, horovod/horovod#3658 (mpirun's tags), NVIDIA/nccl#1410
SOCKETS = """\
gcn5:3350890:3350890 [2] NCCL INFO Channel 09 : 7[e3000] -> 10[ca000] [receive] via NET/Socket/0
[1,5]<stdout>:ip-172-31-12-129:1760:1771 [1] NCCL INFO Channel 00 : 4[1b0] -> 5[1c0] [receive] via NET/Socket/0
h100-kickoff:2340:2384 [4] NCCL INFO Failed to open libibverbs.so[.1]
h100-kickoff:2340:2384 [4] NCCL INFO Using network Socket
""".splitlines()
CLUSTER = ClusterConfig(
    nodes=2,
    nproc_per_node=8,
    gpus_per_node=8,
    gpu_model="NVIDIA H100 80GB HBM3",
    accelerator=Accelerator.cuda,
    interconnect=InterconnectConfig(IntraNode.nvswitch, 18, InterNode.infiniband, 2, 400.0),
)

# a model of 1e9 parameters on it, so that a fall-back has a price
TRAIN = TrainConfig(task="own:Task", parameters=1e9, tokens_per_sample=1024, batch_per_rank=1, precision=Precision.bf16)


def fallbacks(log: NcclLog, cluster: ClusterConfig) -> list[Fallback]:
    return findings.fallbacks(log, RunConfig(cluster=cluster, train=TRAIN), Catalog())


@pytest.mark.parametrize(
    ("via", "kind"),
    [
        ("P2P/CUMEM/read", "P2P/CUMEM"),  # Azure/aks-rdma-infiniband#30
        ("P2P/direct pointer", "P2P/direct pointer"),  # NVIDIA/nccl#429
        ("P2P/IPC comm 0x9bbf3b0 nRanks 4096", "P2P/IPC"),  # RCCL adds the communicator
        ("P2P/MNNVL", "P2P/MNNVL"),
        ("SHM/direct/direct", "SHM"),  # NVIDIA/nccl#1936
        ("direct shared memory", "SHM"),  # NVIDIA/nccl#367, 2.4
        ("NET/IB/12/GDRDMA/Shared", "NET/IB"),  # NVIDIA/nccl#1713
        ("NET/IBext_v8/0(7)/GDRDMA", "NET/IB"),
        ("NET/AWS Libfabric/2/GDRDMA comm 0x9bbf3b0 nRanks 4096", "NET/AWS Libfabric"),
        ("NET/Soc", None),
        ("P2", None),
    ],
)
def test_transports(via: str, kind: str | None) -> None:
    assert transport(via) == kind


def test_a_healthy_pair_of_nodes() -> None:
    log = read(GOOD)
    assert log.connected == {"NET/IB": 2, "P2P/CUMEM": 1}
    assert (log.gpudirect, log.staged, log.devices, log.nics) == (2, 0, {2, 3}, ["mlx5_0", "mlx5_2"])
    assert log.nvls is True
    assert fallbacks(log, CLUSTER) == []
    assert "GPUDirect RDMA on 2 of 2" in used(log)


def test_sockets_where_infiniband_is_declared() -> None:
    log = read(SOCKETS)
    assert log.connected == {"NET/Socket": 2}
    (found,) = fallbacks(log, CLUSTER)
    assert "TCP sockets between nodes, where infiniband is declared: Failed to open libibverbs" in str(found)
    now = predict(RunConfig(cluster=CLUSTER, train=TRAIN), Catalog())
    told = re.fullmatch(r"predicted: a step takes ([\d.]+) s instead of ([\d.]+) ms, (\d+) times as long", found.cost)
    assert told
    assert float(told[2]) == pytest.approx(now.step_s * 1e3, rel=0.01)
    slow = float(told[1]) * 1e3
    assert slow == pytest.approx(4e9 / 1.5e9 * 1e3, rel=0.3)  # a tree sends all gradients once over 1.5 GB/s
    assert slow / float(told[2]) == pytest.approx(float(told[3]), rel=0.05)
    ethernet = dataclasses.replace(CLUSTER.interconnect, inter_node=InterNode.ethernet)
    assert fallbacks(log, dataclasses.replace(CLUSTER, interconnect=ethernet)) == []


def test_host_memory_where_nvlink_is_declared() -> None:
    log = read(["proxmox:1495819 [0] NCCL INFO Channel 00 : 0[1] -> 1[2] via SHM/direct/direct"])  # without a thread id
    (found,) = fallbacks(log, CLUSTER)
    assert "ranks 0-1 of one node went through host memory (SHM), where nvswitch is declared" in found.text
    assert "a step takes" in found.cost
    unknown = findings.fallbacks(log, RunConfig(cluster=CLUSTER), Catalog())  # a script of unknown size
    assert "an all-reduce of 64 MiB takes" in unknown[0].cost
    nowhere = dataclasses.replace(CLUSTER, gpu_model="Voodoo 2")
    assert fallbacks(log, nowhere)[0].cost == ""
    pcie = dataclasses.replace(CLUSTER.interconnect, intra_node=IntraNode.pcie)
    assert fallbacks(log, dataclasses.replace(CLUSTER, interconnect=pcie)) == [], "by design on such boxes"


def test_network_inside_a_node() -> None:
    lines = [
        "a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0",
        "a:3:4 [1] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [receive] via NET/Socket/0",
    ]
    assert "ranks 0-1 of one node went through the network" in str(fallbacks(read(lines), CLUSTER)[0])
    apart = [lines[0], lines[1].replace("a:3", "b:3")]
    assert not [one for one in fallbacks(read(apart), CLUSTER) if "of one node" in one.text]


def test_no_gpudirect_and_too_few_nics() -> None:
    lines = [line.replace("/GDRDMA", "").replace(" [1]mlx5_2:1/IB", "") for line in GOOD]
    texts = [str(one) for one in fallbacks(read(lines), CLUSTER)]
    assert any("no connection between nodes uses GPUDirect" in text for text in texts)
    (halved,) = (text for text in texts if "1 of 2 declared NICs" in text)
    assert re.search(r"(1\.[5-9]|2) times as long", halved), halved  # the network is most of the step here


def test_no_nvls_on_hopper() -> None:
    log = read(["user:16906:16952 [7] NCCL INFO NVLS multicast support is not available on dev 7"])  # nccl-tests#188
    assert "NVLS is not available" in fallbacks(log, CLUSTER)[0].text
    assert fallbacks(log, dataclasses.replace(CLUSTER, gpu_model="NVIDIA A100-SXM4-80GB")) == []


def test_lines_written_over_one_another() -> None:
    """From a log of 8 ranks on one p5.48xlarge that was published so."""
    glued = (
        "gpu-dev:1798:1798 [3] NCCL INFO 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channe"
        "gpu-dev:1796:1796 [1] NCCL INFO 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels"
    )
    log = read([glued])
    assert (log.lines, log.channels, log.nvls_channels) == (2, 24, 16)


@pytest.mark.parametrize(
    ("line", "chosen"),
    [
        (  # RCCL and NCCL before 2.24
            "node-0:309:309 [0] NCCL INFO AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008",
            ("AllGather", "RING", "SIMPLE"),
        ),
        (  # NCCL's documentation of NCCL_DEBUG_SUBSYS=TUNING
            "node-01:63:63 [0] NCCL INFO AllReduce: 33554432 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..31}",
            ("AllReduce", "RING", "SIMPLE"),
        ),
    ],
)
def test_algorithms(line: str, chosen: tuple[str, str, str]) -> None:
    assert read([line]).algorithms == {chosen: 1}


def test_older_and_other_lines() -> None:
    log = read(
        [
            "ml3:32632:32662 [0] NCCL INFO Net/IB: call to devices() returned 0 devices.",  # horovod#685, 2.3
            "NCCL version 2.3.7+cuda9.0",
            "c6ad99331184:117277:117384 [0] NCCL INFO Ring 00 : 15 -> 0 [receive] via NET/Socket/0",  # nccl#367
            "c6ad99331184:117291:117389 [0] NCCL INFO Ring 00 : 2[0] -> 3[0] via direct shared memory",
            "[2025-05-05 12:00:00] n1:7:8 [0] misc/socket.cc:441 NCCL WARN socketFinalizeAccept: wrong type 4 != 3",
        ]
    )
    assert (log.version, log.connected) == ("2.3.7+cuda9.0", {"NET/Socket": 1, "SHM": 1})
    assert log.warnings == ["socketFinalizeAccept: wrong type 4 != 3"]


def test_every_prefix_of_a_log_can_be_read() -> None:
    text = "\n".join([*GOOD, *SOCKETS])
    for end in range(len(text)):
        read(text[:end].splitlines())


def test_nothing_is_not_healthy() -> None:
    assert unclear(read([])) == "no NCCL lines were found"
    assert "ends before" in unclear(read(["n1:1:2 [0] NCCL INFO cudaDriverVersion 12010"]))
    assert unclear(read(GOOD)) == ""


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path / "1", 1)
    attempt.make()
    config = RunConfig(cluster=CLUSTER, train=TRAIN)
    assert nccl_lines(attempt, config) == []
    attempt.nccl_log("n1", 0, 0).write_text("\n".join(SOCKETS))
    attempt.nccl_log("n1", 1, 0).write_bytes(b"\xff\xfe")
    lines = nccl_lines(attempt, config)
    assert lines[0].startswith("NCCL: NET/Socket x2")
    assert lines[1].startswith("NCCL: fell back: TCP sockets between nodes")


def test_a_fall_back_shows_wherever_one_looks(tmp_path: Path, clusterrun_here: Callable[..., Ended]) -> None:
    run = RunDir.create(tmp_path, "fell")
    shared = dataclasses.replace(CLUSTER, shared_dir=str(tmp_path), name="dgx")
    run.config.write_text(frozen.to_yaml(RunConfig(cluster=shared, train=TRAIN)))
    ledger = Ledger(run.ledger)
    number = ledger.start(reason="first start", job_id="1", saved_before=None)
    run.attempt(number).make()
    run.attempt(number).nccl_log("n1", 0, 0).write_text("\n".join(SOCKETS))
    ledger.end(number, Ending.done, saved_after=None, exit_code=0, message="")
    said = "fell back: TCP sockets between nodes, where infiniband is declared"
    for verb in (("status", "fell"), ("logs", "fell", "--errors"), ("logs", "fell"), ("report", "fell")):
        ended = clusterrun_here(*verb, "--shared-dir", str(tmp_path))
        assert ended.code == 0, ended.stderr
        assert said in ended.stdout, verb
        assert "times as long" in ended.stdout, verb
    page = tmp_path / "page.html"
    clusterrun_here("report", "fell", "--shared-dir", str(tmp_path), "--html", str(page))
    assert "NCCL fell back" in page.read_text()
    value = json.loads(clusterrun_here("report", "fell", "--shared-dir", str(tmp_path), "--json").stdout)
    assert any(said in line for line in value["nccl"])


CORPUS = Path(__file__).parents[1] / "corpus" / "nccl_tests"


def test_logs_of_the_corpus_hold_no_fall_back_that_is_none() -> None:
    """Lines of NCCL in published tables, none of which names a transport: nothing is concluded from them."""
    with_lines = 0
    for file in CORPUS.glob("*.txt"):
        log = read(file.read_text(errors="replace").splitlines())
        with_lines += bool(log.lines)
        if not log.connected:
            assert [str(one) for one in fallbacks(log, CLUSTER) if "GPUDirect" in one.text or "ranks" in one.text] == []
    assert with_lines
