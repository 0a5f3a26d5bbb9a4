"""The workers' environment: what is derived, who wins, what hurts, what each node settles."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from clusterrun.config.compose import compose
from clusterrun.config.schema import (
    Accelerator,
    ClusterConfig,
    Executor,
    InterconnectConfig,
    InterNode,
    IntraNode,
    NumaBinding,
    RunConfig,
)
from clusterrun.config.validate import validated
from clusterrun.errors import CommandError, ConfigError
from clusterrun.nccl.harm import harms, relevant, selected, stale_names
from clusterrun.nccl.on_node import numa_mode, on_node
from clusterrun.nccl.settings import planned, step_environment
from clusterrun.process import run, start
from clusterrun.rundir import read_json_lines
from clusterrun.topology.model import Gpu, Link, LinkKind, Nic, Topology

WIRING = InterconnectConfig(IntraNode.nvswitch, 18, InterNode.infiniband, 2, 400.0)
CLUSTER = ClusterConfig(
    executor=Executor.slurm,
    nodes=2,
    gpus_per_node=2,
    nproc_per_node=2,
    cpus_per_proc=6,
    gpu_model="NVIDIA H100 80GB HBM3",
    accelerator=Accelerator.cuda,
    interconnect=WIRING,
)
CONFIG = RunConfig(cluster=CLUSTER)


def value(name: str, config: RunConfig = CONFIG, **environ: str) -> tuple[str | None, str]:
    return next((s.value, s.source) for s in planned(config, environ) if s.name == name)


def with_cluster(**change: object) -> RunConfig:
    return RunConfig(cluster=dataclasses.replace(CLUSTER, **change))  # type: ignore[arg-type]


def nic(
    name: str, kind: LinkKind = LinkKind.PIX, rate: float = 400.0, layer: str = "InfiniBand", up: bool = True
) -> Nic:
    link = Link(kind)
    return Nic(name, name, (link, link), (), rate, layer, "ACTIVE" if up else "DOWN", "LinkUp")


def node(*nics: Nic) -> Topology:
    gpus = (Gpu("GPU0", 0), Gpu("GPU1", 1))
    return Topology(gpus, ((None, None), (None, None)), tuple(nics))


class TestWhoWins:
    def test_cluster_env_then_the_users_then_ours(self) -> None:
        assert value("OMP_NUM_THREADS") == ("6", "derived")
        assert value("OMP_NUM_THREADS", OMP_NUM_THREADS="3") == ("3", "your environment")
        own = with_cluster(env={"OMP_NUM_THREADS": "2", "MINE": "x"})
        assert value("OMP_NUM_THREADS", own, OMP_NUM_THREADS="3") == ("2", "cluster.env")
        assert value("MINE", own) == ("x", "cluster.env")

    def test_what_the_user_set_is_not_set_again(self) -> None:
        assert "NCCL_DEBUG" not in step_environment(CONFIG, {"NCCL_DEBUG": "WARN"})
        assert step_environment(CONFIG, {})["NCCL_DEBUG"] == "INFO"

    def test_every_variable_has_a_reason(self) -> None:
        assert all(one.reason for one in planned(CONFIG, {}))

    def test_many_ranks_log_less(self) -> None:
        assert value("NCCL_DEBUG", with_cluster(nodes=300)) == ("WARN", "derived")

    def test_no_nccl_without_gpus(self) -> None:
        names = [s.name for s in planned(with_cluster(accelerator=Accelerator.cpu), {})]
        assert not [name for name in names if "NCCL" in name]


class TestOnANode:
    def test_all_nics_fit_and_nothing_is_set(self) -> None:
        assert [s.value for s in on_node(CONFIG, node(nic("mlx5_0"), nic("mlx5_1")), {})] == [None, None]

    @pytest.mark.parametrize(
        "odd",
        [nic("x", layer="Ethernet"), nic("x", rate=100.0), nic("x", up=False), nic("x", kind=LinkKind.SYS)],
        ids=["link layer", "rate", "down", "far from every GPU"],
    )
    def test_what_does_not_fit_is_left_out(self, odd: Nic) -> None:
        hca, _ = on_node(CONFIG, node(nic("mlx5_0"), odd, nic("mlx5_1")), {})
        assert hca.value == "=mlx5_0,mlx5_1"
        assert "x" in hca.reason

    def test_the_users_choice_stays(self) -> None:
        hca, _ = on_node(CONFIG, node(nic("mlx5_0"), nic("x", up=False)), {"NCCL_IB_HCA": "mlx5_9"})
        assert (hca.value, hca.source) == ("mlx5_9", "your environment")

    @pytest.mark.parametrize(("kind", "level"), [("PIX", None), ("PXB", None), ("PHB", "PHB"), ("SYS", None)])
    def test_gpudirect(self, kind: str, level: str | None) -> None:
        _, gdr = on_node(CONFIG, node(nic("a", LinkKind[kind]), nic("b", LinkKind[kind])), {})
        assert gdr.value == level

    def test_not_known_is_left_to_nccl(self) -> None:
        assert all(s.value is None and "could not be read" in s.reason for s in on_node(CONFIG, None, {}))


class TestNuma:
    def mode(self, config: RunConfig = CONFIG, **change: object) -> tuple[str | None, str]:
        usual: dict[str, object] = {"torch_can": True, "numactl": True, "near_cpus": ["0-3", "4-7"], "allowed": {0, 4}}
        return numa_mode(config, **{**usual, **change})  # type: ignore[arg-type]

    def test_bound(self) -> None:
        assert self.mode()[0] == "node"
        assert self.mode(with_cluster(numa_binding=NumaBinding.exclusive))[0] == "exclusive"

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"torch_can": False}, "no --numa-binding"),
            ({"numactl": False}, "numactl"),
            ({"near_cpus": ["0-3", None]}, "not known"),
            ({"near_cpus": ["0-3", "0-3"]}, "same CPUs"),
            ({"allowed": {0, 1}}, "not given CPUs"),
        ],
    )
    def test_not_bound_rather_than_failing_every_worker(self, change: dict[str, object], word: str) -> None:
        mode, why = self.mode(**change)
        assert mode is None
        assert word in why


HARMFUL = [
    ("NCCL_P2P_DISABLE", "1", {}, "NVLink is not used"),
    ("NCCL_P2P_LEVEL", "LOC", {}, "NVLink is not used"),
    ("NCCL_IB_DISABLE", "1", {}, "TCP sockets"),
    ("NCCL_NET", "Socket", {}, "TCP sockets"),
    ("NCCL_NET_GDR_LEVEL", "LOC", {}, "host memory"),
    ("NCCL_ALGO", "Ring", {}, "forced"),
    ("NCCL_PROTO", "LL", {}, "forced"),
    ("NCCL_NVLS_ENABLE", "0", {}, "NVLS"),
    ("NCCL_SOCKET_IFNAME", "=lo", {}, "loopback"),
    ("NCCL_DEBUG", "TRACE", {}, "every call"),
    ("NCCL_DEBUG_FILE", "/tmp/nccl.log", {}, "over one file"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", {}, "hangs"),
    ("CUDA_LAUNCH_BLOCKING", "1", {}, "overlap"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", {}, "every collective"),
]


@pytest.mark.parametrize(("name", "bad", "change", "word"), HARMFUL)
def test_what_hurts(name: str, bad: str, change: dict[str, object], word: str) -> None:
    (found,) = harms({name: bad}, CLUSTER)
    assert word in str(found)


@pytest.mark.parametrize(
    ("name", "fine"),
    [("NCCL_P2P_DISABLE", "0"), ("NCCL_IB_DISABLE", "0"), ("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", "/x/%h.%p")],
)
def test_what_does_not_hurt(name: str, fine: str) -> None:
    assert harms({name: fine}, CLUSTER) == []
    assert harms({}, CLUSTER) == [], "NCCL_DEBUG unset is fine"


def test_no_ib_no_loss() -> None:
    wiring = InterconnectConfig(IntraNode.pcie, inter_node=InterNode.ethernet)
    assert harms({"NCCL_IB_DISABLE": "1"}, dataclasses.replace(CLUSTER, interconnect=wiring)) == []


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("eth", ["eth0", "eth1"]), ("=eth", []), ("=eth1:1", ["eth1"]), ("^eth", ["ib0"]), ("^=eth0", ["eth1", "ib0"])],
)
def test_ncclss_lists_of_names(pattern: str, names: list[str]) -> None:
    assert selected(pattern, ["eth0", "eth1", "ib0"]) == names


def test_stale_names() -> None:
    there = ["lo", "ib0"]
    assert "ib0" in str(stale_names({"NCCL_SOCKET_IFNAME": "eth"}, there, None)[0])
    assert "no network interface eth0" in str(stale_names({"GLOO_SOCKET_IFNAME": "ib0,eth0"}, there, None)[0])
    assert stale_names({"NCCL_IB_HCA": "mlx4"}, None, ["mlx5_0"])
    assert stale_names({"NCCL_SOCKET_IFNAME": "ib", "NCCL_IB_HCA": "mlx5"}, there, ["mlx5_0"]) == []
    assert stale_names({"NCCL_SOCKET_IFNAME": "eth"}, None, None) == [], "not known is not judged"


def test_a_report_holds_nothing_else_of_the_environment() -> None:
    assert relevant({"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x"}) == {"NCCL_DEBUG": "INFO"}


def test_a_program_that_may_not_be_run(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    with pytest.raises(CommandError, match="can't be started: Permission denied"):
        run([str(script)], timeout_s=5)
    with pytest.raises(CommandError, match="can't be started"):
        start([str(script)])


@pytest.mark.parametrize("wanted", ["new", "535.", "5 35", ""])
def test_a_driver_version_that_is_none(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"preflight\.min_driver"):
        validated(compose([f"preflight.min_driver='{wanted}'"]))
    validated(compose(["preflight.min_driver='535.104.05'"]))


def test_a_damaged_block_costs_its_lines_only(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"a": 1}\n\xff\xfe\x80\n{"a": 2}\n')
    assert [record["a"] for record in read_json_lines(file)] == [1, 2]
