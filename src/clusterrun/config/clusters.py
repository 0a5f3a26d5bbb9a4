"""The cluster configurations that can be chosen, read without composing each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from clusterrun.config.compose import PACKAGED
from clusterrun.config.user_dirs import user_config_dirs


@dataclass(frozen=True)
class KnownCluster:
    """One ``cluster=NAME``. Values that its file leaves to the schema or to other files are None."""

    name: str
    place: str  # its file, or "packaged"
    description: str
    executor: str | None
    nodes: int | None
    gpus_per_node: int | None
    intra_node: str | None
    inter_node: str | None
    shadows: str | None = None  # where the one of the same name is that it stands before
    problem: str | None = None  # why its file can't be read

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def known_clusters() -> list[KnownCluster]:
    """By name; of several with the same name the one that counts."""
    found: dict[str, KnownCluster] = {}
    for place, name, text in _files():
        if name in found:
            first = found[name]
            found[name] = KnownCluster(**{**asdict(first), "shadows": first.shadows or place})
        else:
            found[name] = _read(place, name, text)
    return [found[name] for name in sorted(found)]


def _files() -> Iterator[tuple[str, str, str | None]]:
    """Place, name and text, the strongest first. No text: the file can't be read."""
    for directory in user_config_dirs():
        for path in sorted((directory / "cluster").rglob("*.yaml")):
            yield str(path), path.relative_to(directory / "cluster").with_suffix("").as_posix(), _text(path)
    for item in sorted(files(PACKAGED).joinpath("cluster").iterdir(), key=lambda entry: entry.name):
        if item.name.endswith(".yaml"):
            yield "packaged", item.name.removesuffix(".yaml"), item.read_text(encoding="utf-8")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _read(place: str, name: str, text: str | None) -> KnownCluster:
    try:
        values = yaml.safe_load(text) if text is not None else None
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict):
        return KnownCluster(name, place, "", None, None, None, None, None, problem="can't be read as a configuration")
    wiring = values.get("interconnect")
    wiring = wiring if isinstance(wiring, dict) else {}
    return KnownCluster(
        name=name,
        place=place,
        description=str(values.get("description") or ""),
        executor=values.get("executor"),
        nodes=values.get("nodes"),
        gpus_per_node=values.get("gpus_per_node"),
        intra_node=wiring.get("intra_node"),
        inter_node=wiring.get("inter_node"),
    )
