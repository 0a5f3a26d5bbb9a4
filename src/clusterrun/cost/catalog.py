"""The hardware catalogue: ``hardware/gpu/*.yaml`` and ``hardware/network/*.yaml``, packaged and the user's.

Figures are data, each file with its source; a user's file adds to ours or, under the same name, takes its place.
Bandwidths are decimal GB/s, one way; peaks are dense TFLOPS.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from clusterrun.errors import ConfigError, choices, nearest

_FOLDER = "hardware"
_PACKAGED = "clusterrun.conf"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 10x the speed, where libyaml is there
_T = TypeVar("_T")


@dataclass(frozen=True)
class LinkFigures:
    """GPU-to-GPU links of one GPU."""

    kind: str  # nvlink or xgmi
    generation: int
    links: int
    gb_per_s: float  # of one link, one way
    joined_by: list[str]  # what these links can form, the usual first, as cluster.interconnect.intra_node

    @property
    def total_gb_per_s(self) -> float:
        """All links of one GPU, one way."""
        return self.links * self.gb_per_s


@dataclass(frozen=True)
class PeakFigures:
    """Dense TFLOPS by format; None where the GPU has no units for it. fp32 without tensor cores, torch's default."""

    fp32: float
    bf16: float | None
    fp16: float | None
    fp8: float | None


@dataclass(frozen=True)
class PublishedAllReduce:
    """Bus bandwidth of a large all-reduce in one node, as somebody published it."""

    gpus: int
    wiring: str  # as cluster.interconnect.intra_node
    algorithm: str  # ring or nvls
    busbw_gb_per_s: float


@dataclass(frozen=True)
class GpuFigures:
    """One GPU model.

    Attributes:
        names: patterns over the name that NVML gives.
        memory_gb: GB of device memory; ``memory_gb_per_s`` its bandwidth.
        achieved_bf16_tflops: what a large matrix product reaches, None where nobody published it.
        all_reduce: what was published of all-reduce in one node.
    """

    names: list[str]
    link: LinkFigures | None
    pcie_generation: int | None
    memory_gb: float
    memory_gb_per_s: float
    peak_tflops: PeakFigures
    achieved_bf16_tflops: float | None
    board_power_w: float
    nvls: bool
    p2p_over_pcie: bool
    all_reduce: list[PublishedAllReduce]
    notes: list[str]
    source: str


@dataclass(frozen=True)
class NetworkFigures:
    """One port of a network between nodes."""

    description: str
    kind: str  # infiniband, roce, efa or ethernet
    gbit_per_s: float  # wire rate, one way
    achieved_share: float  # of the wire rate, by a large all-reduce
    source: str

    @property
    def wire_gb_per_s(self) -> float:
        return self.gbit_per_s / 8

    @property
    def achieved_gb_per_s(self) -> float:
        return self.wire_gb_per_s * self.achieved_share


@dataclass(frozen=True)
class CpuParameters:
    """Gloo over TCP, and the CPU cores that compute. Times in microseconds, rates decimal GB/s one way.

    Attributes:
        hop_in_node_us, hop_between_us: one step of the ring over the loopback interface and over a network.
        chunk_share: as in ModelParameters.
        loopback_gb_per_s: bus bandwidth between ranks of one machine, and the most of one connection.
        link_share: of a network's wire rate, headers and acknowledgements taken off.
        core_gflops: fp32, of one core in a training step.
        step_us: Python's part of a step.
    """

    base_us: float
    hop_in_node_us: float
    hop_between_us: float
    chunk_share: float
    loopback_gb_per_s: float
    link_share: float
    core_gflops: float
    memory_gb_per_s: float
    step_us: float


@dataclass(frozen=True)
class ModelParameters:
    """Fitted parameters of the collectives' cost (``hardware/collectives.yaml``). Times in microseconds.

    Attributes:
        base_us: start of a collective.
        hop_in_node_us, hop_between_us: one step over a link in a node, and between nodes by kind of network.
        chunk_in_node, chunk_between: what a chunk costs beside its bytes, as a share of a hop's latency.
        link_share, pcie_share, tree_share: of the wire rate; see the file.
        host_gb_per_s, socket_gb_per_s: bus bandwidth through host memory, and a node's over NCCL's TCP sockets.
    """

    base_us: float
    hop_in_node_us: float
    hop_between_us: dict[str, float]
    chunk_in_node: float
    chunk_between: dict[str, float]
    link_share: float
    pcie_share: float
    tree_share: float
    host_gb_per_s: float
    socket_gb_per_s: float
    cpu: CpuParameters


PCIE_X16_GB_PER_S: Mapping[int, float] = {3: 15.75, 4: 31.5, 5: 63.0, 6: 121.0}
"""Wire rate of 16 lanes, one way: 8, 16 and 32 GT/s with 128b/130b coding; 64 GT/s with FLIT coding (PCI-SIG)."""


class Catalog:
    """All known hardware. ``directories`` are the user's config directories, the strongest first."""

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        self._roots: list[Path] = [d / _FOLDER for d in directories] + [Path(str(files(_PACKAGED))) / _FOLDER]
        self._found: dict[str, tuple[str, GpuFigures] | None] = {}  # a plan asks for the same GPU several times
        self._parameters: ModelParameters | None = None

    def gpu_names(self) -> list[str]:
        """Names in the catalogue, e.g. a100_sxm_80gb."""
        return sorted(self._files("gpu"))

    def network_names(self) -> list[str]:
        return sorted(self._files("network"))

    def gpu(self, name: str) -> GpuFigures:
        """Figures by catalogue name. Raises ConfigError for an unknown name or a wrong file."""
        return self._read("gpu", name, GpuFigures)

    def network(self, name: str) -> NetworkFigures:
        return self._read("network", name, NetworkFigures)

    def find_gpu(self, model: str) -> tuple[str, GpuFigures] | None:
        """The GPU whose ``names`` match what NVML calls it (or whose catalogue name it is); None when none does."""
        if model not in self._found:
            self._found[model] = self._find_gpu(model)
        return self._found[model]

    def _find_gpu(self, model: str) -> tuple[str, GpuFigures] | None:
        known = self._files("gpu")
        if model in known:
            return model, self.gpu(model)
        for name, file in known.items():
            if _may_match(file, model):
                figures = self.gpu(name)
                if any(fnmatchcase(model.lower(), pattern.lower()) for pattern in figures.names):
                    return name, figures
        return None

    def find_network(self, kind: str, gbit_per_s: float) -> tuple[str, NetworkFigures] | None:
        """The network of a kind with the nearest rate from below; the slowest when the rate is below all of them."""
        of_kind = [(n, f) for n in self.network_names() if (f := self.network(n)).kind == kind]
        if not of_kind:
            return None
        below = [item for item in of_kind if item[1].gbit_per_s <= gbit_per_s]
        return max(below, key=lambda i: i[1].gbit_per_s) if below else min(of_kind, key=lambda i: i[1].gbit_per_s)

    def parameters(self) -> ModelParameters:
        """Of the cost model, from the user's file or ours."""
        if self._parameters is None:
            file = next(root / "collectives.yaml" for root in self._roots if (root / "collectives.yaml").is_file())
            self._parameters = _loaded(file, ModelParameters)
        return self._parameters

    def _files(self, kind: str) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for root in self._roots:
            folder = root / kind
            if folder.is_dir():
                for file in folder.iterdir():
                    if file.name.endswith(".yaml"):
                        found.setdefault(file.name.removesuffix(".yaml"), file)
        return found

    def _read(self, kind: str, name: str, into: type[_T]) -> _T:
        known = self._files(kind)
        if name not in known:
            raise ConfigError(
                f"hardware/{kind}/{name}: not in the catalogue.{nearest(name, known)} Known: {choices(known)}"
            )
        return _loaded(known[name], into)


def _may_match(file: Path, model: str) -> bool:
    """By its ``names`` alone, whether to read the file: reading them all takes as long as the rest of a plan."""
    try:
        block = re.search(r"^names:.*?(?=^[^\s#-]|\Z)", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        names = yaml.load(block[0], _Loader)["names"] if block else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return True  # reading it whole says what is wrong
    return not isinstance(names, list) or any(fnmatchcase(model.lower(), str(name).lower()) for name in names)


def _loaded(file: Path, into: type[_T]) -> _T:
    try:
        loaded = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: can't be read: {' '.join(str(error).split())}") from None
    return _built(into, loaded, str(file))


def _built(into: type[_T], value: Any, where: str) -> _T:
    """A dataclass from a mapping, every field checked. Raises ConfigError naming file and field."""
    assert dataclasses.is_dataclass(into)
    hints = typing.get_type_hints(into)
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a mapping with {choices(hints)}")
    for key in value:
        if key not in hints:
            raise ConfigError(f"{where}: unknown field '{key}'.{nearest(str(key), hints)} Fields: {choices(hints)}")
    missing = [key for key in hints if key not in value]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} missing")
    return into(**{key: _checked(hint, value[key], f"{where}: {key}") for key, hint in hints.items()})


def _checked(hint: Any, value: Any, where: str) -> Any:
    kinds = typing.get_args(hint)
    if type(None) in kinds:
        if value is None:
            return None
        (hint,) = (kind for kind in kinds if kind is not type(None))
    if dataclasses.is_dataclass(hint):
        return _built(typing.cast(type[Any], hint), value, where)
    origin = typing.get_origin(hint)
    if origin is list and isinstance(value, list):
        return [_checked(typing.get_args(hint)[0], item, where) for item in value]
    if origin is dict and isinstance(value, dict):
        return {str(key): _checked(typing.get_args(hint)[1], item, where) for key, item in value.items()}
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint in (int, float) and number and value > 0 and (hint is float or value == int(value)):
        return hint(value)
    if hint in (str, bool) and isinstance(value, hint):
        return value
    wanted = {int: "a whole number above 0", float: "a number above 0", str: "text", bool: "true or false"}
    raise ConfigError(f"{where}={value!r}: must be {wanted.get(hint, 'a list' if origin is list else 'a mapping')}")
