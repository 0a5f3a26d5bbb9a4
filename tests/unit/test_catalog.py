"""The hardware catalogue: every packaged file is right, users add and shadow, wrong files are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clusterrun.config.schema import IntraNode
from clusterrun.cost.catalog import PCIE_X16_GB_PER_S, Catalog
from clusterrun.errors import ConfigError

ROOT = Path(__file__).parents[2]
NVML_NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100_sxm_80gb",
    "A100-SXM4-40GB": "a100_sxm_40gb",
    "NVIDIA A100 80GB PCIe": "a100_pcie_80gb",
    "NVIDIA A100-PCIE-40GB": "a100_pcie_40gb",
    "Tesla V100-SXM2-16GB": "v100_sxm2",
    "NVIDIA H100 80GB HBM3": "h100_sxm",
    "NVIDIA H100 PCIe": "h100_pcie",
    "NVIDIA H100 NVL": "h100_nvl",
    "NVIDIA H200": "h200_sxm",
    "NVIDIA B200": "b200_sxm",
    "NVIDIA GB200": "gb200",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA RTX A6000": "rtx_a6000",
    "NVIDIA GeForce RTX 3090": "rtx_3090",
    "NVIDIA GeForce RTX 4090": "rtx_4090",
    "NVIDIA GeForce RTX 5090": "rtx_5090",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx_pro_6000",
    "AMD Instinct MI300X": "mi300x",
}


def test_every_file_loads_and_states_its_source() -> None:
    catalog = Catalog()
    gpus = {name: catalog.gpu(name) for name in catalog.gpu_names()}
    networks = {name: catalog.network(name) for name in catalog.network_names()}
    assert set(NVML_NAMES.values()) == set(gpus)
    assert {f.kind for f in networks.values()} == {"infiniband", "roce", "efa", "ethernet"}
    assert all(figures.source for figures in [*gpus.values(), *networks.values()])
    assert all(0 < f.achieved_share < 1 for f in networks.values())
    for figures in gpus.values():  # nothing measured is above what the formats and wires allow
        peak = figures.peak_tflops.bf16 or figures.peak_tflops.fp16
        assert peak is not None
        assert (figures.achieved_bf16_tflops or 0) < peak
        for one in figures.all_reduce:
            limit = figures.link.total_gb_per_s if figures.link else PCIE_X16_GB_PER_S[figures.pcie_generation or 0]
            assert one.busbw_gb_per_s < (2 if one.algorithm == "nvls" else 1) * limit
            assert one.algorithm in ("ring", "nvls")
            IntraNode(one.wiring)
        for wiring in figures.link.joined_by if figures.link else ():
            IntraNode(wiring)


@pytest.mark.parametrize(("model", "name"), NVML_NAMES.items())
def test_nvml_names_are_found(model: str, name: str) -> None:
    found = Catalog().find_gpu(model)
    assert found is not None
    assert found[0] == name


@pytest.mark.parametrize("model", ["NVIDIA A100X", "NVIDIA A10G", "NVIDIA L40", "NVIDIA B2000", ""])
def test_other_models_are_not_guessed(model: str) -> None:
    assert Catalog().find_gpu(model) is None


def test_figures_that_are_often_told_wrong() -> None:
    """900 GB/s of an H100 is both ways over 18 links; an A100 has 300 one way; PCIe 4.0 x16 is 31.5."""
    h100, a100, bridge = (Catalog().gpu(n) for n in ("h100_sxm", "a100_sxm_80gb", "rtx_3090"))
    assert h100.link is not None
    assert a100.link is not None
    assert bridge.link is not None
    assert (h100.link.links, h100.link.total_gb_per_s, a100.link.total_gb_per_s) == (18, 450, 300)
    assert bridge.link.total_gb_per_s == pytest.approx(56.25)
    assert not a100.nvls
    assert PCIE_X16_GB_PER_S[4] == 31.5


def test_networks_by_kind_and_rate() -> None:
    catalog = Catalog()
    asked = [("infiniband", 400), ("infiniband", 56), ("roce", 150), ("ethernet", 40), ("efa", 400), ("token_ring", 16)]
    found = [catalog.find_network(kind, rate) for kind, rate in asked]
    assert [f[0] if f else None for f in found] == ["ndr", "edr", "roce_100", "tcp_25", "efa_400", None]
    assert catalog.network("ndr").wire_gb_per_s == 50


def test_users_add_and_shadow(tmp_path: Path) -> None:
    own = tmp_path / "hardware" / "gpu"
    own.mkdir(parents=True)
    text = (ROOT / "conf/hardware/gpu/a10.yaml").read_text()
    (own / "a10.yaml").write_text(text.replace("board_power_w: 150", "board_power_w: 120"))
    (own / "a10g.yaml").write_text(re.sub(r"names: .*", 'names: ["*A10G"]', text))
    catalog = Catalog([tmp_path])
    assert catalog.gpu("a10").board_power_w == 120
    found = catalog.find_gpu("NVIDIA A10G")
    assert found is not None
    assert found[0] == "a10g"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("memory_gb: 24 -> memory_gb: lots", ["memory_gb='lots'", "a number above 0"]),
        ("memory_gb: 24 -> memory_gb: -1", ["memory_gb=-1", "a number above 0"]),
        ("nvls: false -> nvls: 3", ["nvls=3", "true or false"]),
        ("board_power_w: 150 -> bord_power_w: 150", ["unknown field 'bord_power_w'", "Did you mean 'board_power_w'"]),
        ("board_power_w: 150 -> ", ["board_power_w missing"]),
        ("  bf16: 125 -> ", ["peak_tflops", "bf16 missing"]),
        ("link: null -> link: [", ["can't be read"]),
        ("link: null -> link: 4", ["link: must be a mapping"]),
    ],
)
def test_a_wrong_file_is_named(wrong: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "hardware" / "gpu" / "a10.yaml"
    file.parent.mkdir(parents=True)
    before, after = wrong.split(" -> ")
    text = (ROOT / "conf/hardware/gpu/a10.yaml").read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    with pytest.raises(ConfigError) as raised:
        Catalog([tmp_path]).gpu("a10")
    message = str(raised.value)
    assert all(word in message for word in [str(file), *words])
    assert "\n" not in message


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"h100_sxn: not in the catalogue\. Did you mean 'h100_sxm'"):
        Catalog().gpu("h100_sxn")
