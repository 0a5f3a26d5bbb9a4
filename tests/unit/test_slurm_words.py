"""Slurm's outputs, read: squeue and sinfo of real sites (tests/corpus/slurm), sacct, pending reasons, refusals.

sbatch's and sacct's words here were printed by a Slurm 22.05 with slurmdbd, EnforcePartLimits=ALL and limits enforced.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.errors import CommandError
from clusterrun.launch import queue
from clusterrun.launch.gres import Gres, gpu_types, gpus, parse_gres
from clusterrun.launch.sbatch_words import explain
from clusterrun.launch.sinfo import SinfoRow, by_node, read_sinfo
from clusterrun.launch.site import Site, parse_associations, parse_partitions
from clusterrun.launch.slurm_words import how_ended, why_pending

CORPUS = Path(__file__).parents[1] / "corpus" / "slurm"

SINFO = """\
gpu|gpu*|up|4:00:00|1|16|64000|gpu:a100:4|(null)|idle
long|long|up|2-00:00:00|1|16|64000|gpu:a100:4|(null)|idle
long|long|up|2-00:00:00|3|64+|128000|gpu:h100:8(S:0-1)|fast,ib|drained*
"""
SCONTROL = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A DefaultTime=01:00:00 MaxNodes=1
PartitionName=long AllowGroups=ALL AllowAccounts=physics AllowQos=ALL Default=NO DefaultTime=NONE MaxNodes=UNLIMITED
"""
ASSOC = "physics||normal,short|normal\nroot||normal,short|normal\n"
SITE = Site("site", "22.05.8", parse_partitions(SINFO, SCONTROL), parse_associations(ASSOC))
PREFIX = "sbatch: error: Batch job submission failed: "

SACCT = """\
1|wrap|COMPLETED|0:0|vm|None
2|wrap|PENDING|0:0|None assigned|QOSMaxWallDurationPerJobLimit
7|badjob|FAILED|3:0|vm|None
8|killed|CANCELLED by 0|0:0|vm|None
9_1|arr|COMPLETED|0:0|vm|None
"""


def sinfo(number: str) -> list[SinfoRow]:
    (path,) = CORPUS.glob(f"{number}-*")
    return read_sinfo(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("number", "nodes", "with_gpus", "total", "used"),
    [
        ("001", 122, 16, 64, 18),
        ("002", 6, 6, 2 * 12 + 16 + 3 * 4, None),
        ("004", 75, 9, 10, 6),
        ("005", 23, 0, 0, 33),  # shows only what is used
        ("007", 20, 10, 40, 0),
        ("010", 6, 5, 20, 6),
        ("011", 1058, 1058, 4232, 4226),
        ("017", 8, 0, 0, 15),
    ],
)
def test_sinfo_of_real_sites(number: str, nodes: int, with_gpus: int, total: int, used: int | None) -> None:
    rows = by_node(sinfo(number))
    assert sum(row.nodes for row in rows) == nodes
    assert sum(row.nodes for row in rows if row.gpus) == with_gpus
    assert sum(row.gpus for row in rows) == total
    said = [row.gpus_used for row in rows if row.gpus_used is not None]
    assert (sum(said) if said else None) == used


def test_sinfo_details() -> None:
    first = sinfo("001")[:2]
    assert [(r.state, r.marks, r.responds, r.gres) for r in first] == [
        ("mixed", "-", True, ()),
        ("drained", "*", False, ()),
    ]
    by_name = {row.names[0]: row for row in sinfo("007") if row.partition != "high"}
    assert (by_name["na3"].partition, by_name["na4"].default, by_name["nb1"].default) == ("cpu", True, False)
    assert gpu_types(by_name["nb9"].gres) == {"model_a": 2, "model_b": 2}
    node = by_node(sinfo("010"))[4]
    assert (node.names, node.cpus, node.memory_mb) == (("a005",), (144, 144, 0, 288), 876896)
    assert node.used is not None
    assert node.used[0].indices == (0, 3)
    two_types = next(row for row in sinfo("017") if row.names == ("nodeB01",))
    assert two_types.used == (Gres("gpu", "1080ti", 1, "IDX:0"), Gres("gpu", "980gtx", 1, "IDX:1"))
    assert sinfo("017")[-1].names == ("nodeA04", "nodeA05")
    with pytest.raises(ValueError, match="not an output of sinfo"):
        read_sinfo("total 4\ndrwx me you\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(null)", ()),
        ("gpu:8", (Gres("gpu", None, 8),)),
        ("gpu:a100:2(S:0,2),shard:32", (Gres("gpu", "a100", 2, "S:0,2"), Gres("shard", None, 32))),
        ("gpu:tesla:no_consume:1K", (Gres("gpu", "tesla", 1024),)),
        ("cpu=64,mem=62.50G,gres/gpu=8,gres/gpu:h100=8", (Gres("gpu", "h100", 8),)),
    ],
)
def test_gres(text: str, expected: tuple[Gres, ...]) -> None:
    assert parse_gres(text) == expected


def test_mig_slices_are_no_gpus() -> None:
    assert gpus(parse_gres("gpu:nvidia_a100_80gb:8,mig:nvidia_a100_3g.40gb:7")) == 8


def test_squeue_of_a_real_site() -> None:
    text = (CORPUS / "014-squeue-reasons-with-spaces.txt").read_text(encoding="utf-8")
    jobs = queue.entries(text, ("partition", "state", "cpus", "reason", "user"))
    assert len(jobs) == len(text.splitlines())
    assert sum(job.is_pending for job in jobs) == 10
    assert sum(job.is_alive for job in jobs) == 16
    assert {job.user for job in jobs} == {"alice", "bob", "carol", "dave", "eve", "frank"}
    (blocked,) = [job for job in jobs if job.user == "frank" and "DOWN" in job.reason]
    assert blocked.reason.endswith("reserved for jobs in higher priority partitions")
    assert why_pending(blocked.reason).startswith("nodes it needs are down, drained, or reserved")
    assert [job.partition for job in jobs if job.reason == "JobHeldUser"] == ["debug,high"] * 2


def test_squeue_with_a_header_and_reasons_in_brackets() -> None:
    text = """\
             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)
               103      main     wrap     root PD       0:00      9 (PartitionConfig)
            12_[1-4]    main     wrap     root PD       0:00      1 (ReqNodeNotAvail, UnavailableNodes:n[1-2])
                98      main     wrap     root  R       1:00      2 c[1-2]
"""
    pending, held, running = queue.entries(text)
    assert (pending.job_id, pending.state, pending.reason) == ("103", "PENDING", "PartitionConfig")
    assert held.reason == "ReqNodeNotAvail, UnavailableNodes:n[1-2]"
    assert (running.state, running.nodes, running.reason) == ("RUNNING", "c[1-2]", "")
    with_bar = queue.entries("1|a|b|me", ("job_id", "reason", "user"))
    assert (with_bar[0].reason, with_bar[0].user) == ("a|b", "me")


def test_sacct() -> None:
    found = queue.entries(SACCT, ("job_id", "name", "state", "exit_code", "nodes", "reason"))
    assert [entry.state for entry in found] == ["COMPLETED", "PENDING", "FAILED", "CANCELLED", "COMPLETED"]
    assert how_ended(found[2].state, found[2].exit_code).endswith("(exit code 3)")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Priority", "other jobs are ahead"),
        ("(Resources)", "it is next"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-4]", "not available (down, drained, or reserved): n[1-4]"),
        ("ReqNodeNotAvail, Reserved for maintenance", "reserved for maintenance"),
        ("QOSMaxCpuPerUserLimit", "the QOS is at its limit of CPU cores for each user"),
        ("AssocGrpGRES", "your account is at its limit of GPUs (or other GRES) together"),
        ("AssocGrpCPUMinutesLimit", "the time it may spend on CPU cores"),
        ("QOSMaxWallDurationPerJobLimit", "wall-clock time for one job"),
        ("MaxNodePerAccount", "nodes for each account"),
        ("PartitionTimeLimit", "lower cluster.time_limit"),
        ("a text of the site's own plugin", "a text of the site's own plugin"),
        ("None", "has not looked at it yet"),
    ],
)
def test_why_a_job_waits(reason: str, said: str) -> None:
    assert said in why_pending(reason)


@pytest.mark.parametrize(
    ("said", "asked", "wanted"),
    [
        (
            f"sbatch: error: invalid partition specified: nowhere\n{PREFIX}Invalid partition name specified",
            {"partition": "nowhere"},
            ["cluster.slurm.partition=nowhere", "gpu (default, 1 node, gpu:a100:4", "up to 2-00:00:00"],
        ),
        (
            f"{PREFIX}Invalid account or account/partition combination specified",
            {"account": "nobody", "partition": "long"},
            ["cluster.slurm.account=nobody", "physics, root", "partition long takes only physics"],
        ),
        (f"{PREFIX}Invalid qos specification", {"qos": "none"}, ["qos=none", "normal,short"]),
        (
            f"{PREFIX}Requested time limit is invalid (missing or exceeds some limit)",
            {"time": 300},
            ["cluster.time_limit=300 min", "Partition gpu offers at most 4:00:00", "long: at most 2-00:00:00"],
        ),
        (
            f"{PREFIX}Requested node configuration is not available",
            {"nodes": 1, "additional_parameters": {"gpus_per_node": "v100:2"}},
            ["GPUs per node=v100:2", "gpu:a100:4 on 1 node"],
        ),
        (f"{PREFIX}Node count specification invalid", {"nodes": 2}, ["at most 1 nodes a job"]),
        (f"{PREFIX}Invalid feature specification", {"partition": "long", "constraint": "x"}, ["features fast, ib"]),
        (
            f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{PREFIX}Job violates accounting/QOS policy "
            "(job submit limit, user's size and/or time limits)",
            {"qos": "short"},
            ["QOSMaxSubmitJobPerUserLimit", "cluster.slurm.qos=short", "Wait until jobs of yours have ended"],
        ),
    ],
)
def test_a_refusal_is_one_line_with_what_is_offered(said: str, asked: dict[str, object], wanted: list[str]) -> None:
    line = explain(said, asked, lambda: SITE)
    assert "\n" not in line
    assert line.startswith("sbatch refused: ")
    assert "Batch job submission failed" not in line
    for part in wanted:
        assert part in line


def test_a_refusal_when_the_site_cant_be_asked_or_nothing_was_refused() -> None:
    def silent() -> Site:
        raise CommandError("sinfo: no answer")

    assert "can't be asked (sinfo: no answer)" in explain(f"{PREFIX}Invalid qos specification", {}, silent)
    down = explain(f"{PREFIX}Unable to contact slurm controller (connect failure)", {}, silent)
    assert "slurmctld did not answer" in down


def test_the_site() -> None:
    gpu, long = SITE.partitions
    assert SITE.default is gpu
    assert (gpu.max_nodes, long.max_nodes, long.accounts) == (1, None, ("physics",))
    assert (long.nodes, sum(kind.usable for kind in long.kinds)) == (4, 1)
    assert long.gpu_kind is not None
    assert (long.gpus_per_node, long.gpu_kind.cpus) == (8, 64)
