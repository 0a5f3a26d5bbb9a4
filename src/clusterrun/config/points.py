"""The points of a sweep (-m): every form that Hydra's sweepers know, each point composed and frozen here and now.

Hydra gives a sweeper a launcher. Ours composes and submits nothing by itself: Hydra's own sweeper, which knows all
points from the start, only has them collected. Any other (Optuna, Nevergrad, ...) may choose its next points by what
the last ones gave, so each batch it asks for is handed on, run to its end, and answered with a number per point.

Hydra composes a point in about 50 ms, nearly all of it for the choice of groups and files. Here points of the same
choices share one composition, and only values are set anew; the first point of each choice is held against Hydra's own.
Where nothing in it refers to something else (``${...}``), not even that is composed again: the points after the first
are the first with other values, each value read once by OmegaConf; the second is held against the long way.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from clusterrun.config.compose import name_cluster, run_hydra_app, to_run_config
from clusterrun.config.schema import RunConfig
from clusterrun.errors import ClusterrunError, ConfigError

_BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True)
class Point:
    """One point of a sweep. ``error`` says what is wrong with it; then there is no configuration."""

    number: int  # from 0, in the sweeper's order
    overrides: tuple[str, ...]
    config: RunConfig | None
    error: ClusterrunError | None = None


# A batch of points, run to their ends: a number per point, or why there is none.
RunBatch = Callable[[list[Point]], Sequence[float | Exception]]


@dataclass(frozen=True)
class Swept:
    """What came of a sweeper. ``points`` is empty when it had its batches run."""

    sweeper: str
    points: list[Point]
    leftovers: dict[str, bytes]  # files the sweeper wrote, e.g. optimization_results.yaml


def sweep(arguments: Sequence[str], run_batch: RunBatch) -> Swept:
    """Have Hydra's sweeper make the points of ``arguments`` (which hold -m).

    Raises:
        ConfigError: the arguments, or a point that can't be composed.
    """
    launcher = _Launcher(run_batch)
    if any(a.lstrip("+").startswith("hydra/launcher=") for a in arguments):
        raise ConfigError("hydra/launcher: clusterrun submits the points of a sweep itself; leave it out")
    with tempfile.TemporaryDirectory(prefix="clusterrun-sweep-") as scratch, _hydra_launches_with(launcher):
        # What a sweeper writes goes where nobody sees it; what is worth keeping is handed on.
        try:
            run_hydra_app([*arguments, f"hydra.sweep.dir={scratch}", "hydra.sweep.subdir=."], _ignore)
        except (RuntimeError, ImportError) as error:
            if launcher.sweeper:
                raise
            raise ConfigError(f"hydra.sweeper: {str(error).splitlines()[0]}; is its package installed?") from None
        left = {p.name: p.read_bytes() for p in Path(scratch).iterdir() if p.is_file() and p.name != "multirun.yaml"}
    return Swept(launcher.sweeper, launcher.points, left)


@contextmanager
def _hydra_launches_with(launcher: Launcher) -> Iterator[None]:
    """Every sweeper asks Hydra for its launcher and gets this one.

    The regular way, a plugin in the package ``hydra_plugins``, would be imported by every Hydra program of this Python.
    """
    plugins: Any = Plugins.instance()

    def instantiate(hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Launcher:
        launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        return launcher

    plugins.instantiate_launcher = instantiate
    try:
        yield
    finally:
        del plugins.instantiate_launcher


def _ignore(config: DictConfig) -> None:
    raise AssertionError("points go through the launcher")


class _Launcher(Launcher):
    def __init__(self, run_batch: RunBatch) -> None:
        self._run_batch = run_batch
        self._templates: dict[tuple[str, ...], _Template] = {}
        self.points: list[Point] = []
        self.sweeper = ""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        loader = hydra_context.config_loader
        assert isinstance(loader, ConfigLoaderImpl)
        self._loader = _Loader(loader)
        # The sweeper holds the same context: what it composes to see whether a point is right is not composed again.
        hydra_context.config_loader = self._loader
        self._config = config
        self.sweeper = str(config.hydra.sweeper._target_)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        batch = [self._point(initial_job_idx + i, list(items)) for i, items in enumerate(job_overrides)]
        if self.sweeper == _BASIC:
            self.points += batch
            return [_returned(point, 0.0) for point in batch]
        results = self._run_batch(batch)
        return [_returned(point, result) for point, result in zip(batch, results, strict=True)]

    def _point(self, number: int, overrides: list[str]) -> Point:
        values, choices = self._loader.split(overrides)
        template = self._templates.get(choices)
        if template is not None and (config := template.with_values(values)) is not None:
            if template.proven:
                return Point(number, tuple(overrides), config)
            template.proven = True
            long_way = self._composed(number, overrides)
            if long_way.config != config:
                self._templates[choices] = _Template(None, values, self._loader)
            return long_way
        point = self._composed(number, overrides)
        if template is None and point.config is not None:
            self._templates[choices] = _Template(point.config, values, self._loader, self._loader.shared(choices))
        return point

    def _composed(self, number: int, overrides: list[str]) -> Point:
        composed = self._loader.load_point(self._config, overrides)
        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = str(number), number
        HydraConfig.instance().set_config(composed)  # for ${hydra:...}, which is resolved below
        with open_dict(composed):
            choices = composed.pop("hydra").runtime.choices
        name_cluster(composed, choices["cluster"])
        try:
            return Point(number, tuple(overrides), to_run_config(composed))
        except ClusterrunError as error:
            return Point(number, tuple(overrides), None, error)


class _Template:
    """A point of which others with the same choices of files differ by single values. Without one it serves nobody."""

    def __init__(
        self,
        config: RunConfig | None,
        values: Sequence[Override],
        loader: _Loader,
        composed: DictConfig | None = None,
    ) -> None:
        self._config = config
        self._inputs = [str(o.input_line) for o in values]
        self._keys = [o.key_or_group for o in values]
        self._loader = loader
        self._read: dict[str, Any] = {}
        self._scratch = None
        self.proven = False  # the first point made so was the same as composed the long way
        if config is not None and composed is not None and not _refers(_content(composed)):
            self._scratch = copy.deepcopy(composed)

    def with_values(self, values: Sequence[Override]) -> RunConfig | None:
        """The template's configuration with these values; None when it has to be composed."""
        if self._scratch is None or [o.key_or_group for o in values] != self._keys:
            return None
        config = self._config
        for override, before in zip(values, self._inputs, strict=True):
            text = str(override.input_line)
            if text == before:
                continue
            if text not in self._read:
                self._read[text] = self._converted(override)
            if self._read[text] is _NOT_SINGLE:
                return None
            config = _replaced(config, override.key_or_group.split("."), self._read[text])
        return config

    def _converted(self, override: Override) -> Any:
        """A value as OmegaConf has it by the schema's type."""
        single = not override.is_delete() and override.value_type in (None, ValueType.ELEMENT)
        if not single or "${" in str(override.input_line) or isinstance(override.value(), (dict, list)):
            return _NOT_SINGLE
        if override.key_or_group == "cluster.name":  # an empty one is named after the file
            return _NOT_SINGLE
        assert self._scratch is not None
        try:
            self._loader.set_values([override], self._scratch)
            return OmegaConf.select(self._scratch, override.key_or_group, throw_on_missing=True)
        except (OmegaConfBaseException, HydraException):  # composed the long way, this is said as for any point
            return _NOT_SINGLE


_NOT_SINGLE = object()


def _replaced(value: Any, path: list[str], new: Any) -> Any:
    """A copy of a configuration with one value changed; what does not change is shared."""
    if not path:
        return new
    if isinstance(value, dict):
        return {**value, path[0]: _replaced(value.get(path[0], {}), path[1:], new)}
    changed = copy.copy(value)
    setattr(changed, path[0], _replaced(getattr(value, path[0]), path[1:], new))
    return changed


def _refers(value: Any) -> bool:
    """Whether anything in plain values is an interpolation."""
    if isinstance(value, dict):
        return any(_refers(item) for item in value.values())
    if isinstance(value, list):
        return any(_refers(item) for item in value)
    return isinstance(value, str) and "${" in value


def _returned(point: Point, result: float | Exception) -> JobReturn:
    returned = JobReturn(overrides=list(point.overrides))
    returned.status = JobStatus.FAILED if isinstance(result, Exception) else JobStatus.COMPLETED
    returned.return_value = result
    return returned


class _Loader(ConfigLoaderImpl):
    """Hydra's loader of configurations, with the compositions of a sweep shared."""

    def __init__(self, plain: ConfigLoaderImpl) -> None:
        super().__init__(plain.config_search_path)
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._parsed: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}
        self._shares = True

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Sweepers ask to see whether points are right. Hydra's own composes all before any is run."""
        if str(master_config.hydra.sweeper._target_) == _BASIC:
            return master_config
        return self.load_point(master_config, sweep_overrides)

    def load_point(self, master: DictConfig, items: list[str]) -> DictConfig:
        """A point's configuration, for the caller to keep."""
        values, choices = self.split(items)
        if not self._shares:
            return super().load_sweep_config(master, items)
        first = choices not in self._composed
        if first:
            self._composed[choices] = super().load_sweep_config(master, list(choices))
        point = copy.deepcopy(self._composed[choices])
        self._apply_overrides_to_config(values, point)
        own_items = [self._parsed[item] for item in items]
        point.hydra.overrides.task = [str(o.input_line) for o in own_items if not o.is_hydra_override()]
        if first:
            own = super().load_sweep_config(master, items)
            if _content(own) != _content(point):
                self._shares = False
                return own
        return point

    def split(self, items: list[str]) -> tuple[list[Override], tuple[str, ...]]:
        """The overrides that set values, and those that choose among files as they were given."""
        new = [item for item in items if item not in self._parsed]
        if new:
            self._parsed.update(zip(new, OverridesParser.create().parse_overrides(new), strict=True))
        overrides = [self._parsed[item] for item in items]
        values = [o for o in overrides if not self._chooses(o)]
        return values, tuple(str(o.input_line) for o in overrides if self._chooses(o))

    def shared(self, choices: tuple[str, ...]) -> DictConfig | None:
        """The composition that points of these choices share; None when none is."""
        return self._composed.get(choices) if self._shares else None

    def set_values(self, overrides: list[Override], config: DictConfig) -> None:
        """As Hydra sets them. Raises what Hydra and OmegaConf raise for a wrong one."""
        self._apply_overrides_to_config(overrides, config)

    def _chooses(self, override: Override) -> bool:
        """Whether an override chooses among files, or does something else that needs Hydra's whole composition."""
        key = override.key_or_group
        if key not in self._groups:
            self._groups[key] = bool(self.repository.group_exists(key))
        return override.package is not None or self._groups[key]


def _content(config: DictConfig) -> Any:
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    plain.pop("hydra")
    return plain
