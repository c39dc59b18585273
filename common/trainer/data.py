"""The data sets, as arrays in memory, and their split over ranks."""

from __future__ import annotations

import gzip
import json
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import DataError, UsageError

__all__ = [
    "Dataset",
    "Split",
    "batches_of",
    "data_folder",
    "load_dataset",
    "load_mnist_json",
    "rank_batches",
    "rank_indices",
    "read_gzip",
    "read_idx",
]

DIGITS = Path(__file__).with_name("digits.npz")
CLASSES = 10
IN_PADDLES_CACHE = ("mnist", "fashion-mnist")
MOST_BYTES = 1 << 30  # of a file of a data set, unpacked
Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
SIDE = 28  # pixels; every image here is SIDE x SIDE


@dataclass(frozen=True)
class Split:
    """`images`: float32 [n, 1, 28, 28] in 0..1; `labels`: int64 [n] in 0..9."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    train: Split
    test: Split


def load_dataset(name: str, data_dir: Path | None = None, *, seed: int = 1) -> Dataset:
    """Load a data set by the name that `--dataset` takes.

    Raises:
        DataError: a file is missing or corrupt; the message names it and says what to do.
    """
    if name == "digits":
        return load_digits()
    if name == "synthetic":
        return make_synthetic(seed)
    if name == "mnist-json":
        return load_mnist_json(data_dir)
    return load_idx(name, data_dir)


def load_digits() -> Dataset:
    """The 1,797 handwritten digits of scikit-learn (digits.LICENSE), 8x8, each pixel grown to 3x3 inside a border of 2.

    357 images, drawn once and for all, are for testing: that leaves 1,440, which 1 to 6 and 8 ranks divide evenly.
    """
    with np.load(DIGITS) as digits:
        images, labels = digits["images"], digits["labels"]
    grown = np.kron(images / 16, np.ones((3, 3)))
    padded = np.pad(grown, ((0, 0), (2, 2), (2, 2))).astype(np.float32)[:, None]
    test = np.zeros(len(labels), np.bool_)
    test[np.random.RandomState(0).permutation(len(labels))[:357]] = True
    return Dataset(_split(padded, labels, ~test), _split(padded, labels, test))


def _split(images: npt.NDArray[np.float32], labels: npt.NDArray[Any], which: npt.NDArray[np.bool_]) -> Split:
    return Split(images[which], labels[which].astype(np.int64))


def make_synthetic(seed: int) -> Dataset:
    """6,000 + 1,000 images: ten random patterns under noise, so that a model can learn them."""
    random = np.random.default_rng(seed)
    half_patterns = np.float32(0.5) * random.random((CLASSES, 1, SIDE, SIDE), np.float32)

    def draw(count: int) -> Split:
        labels = random.integers(0, CLASSES, count)
        images = random.random((count, 1, SIDE, SIDE), np.float32)  # noise, as yet
        images *= np.float32(0.5)
        images += half_patterns[labels]
        return Split(images, labels)

    return Dataset(draw(6000), draw(1000))


def load_idx(name: str, data_dir: Path | None) -> Dataset:
    """MNIST or Fashion-MNIST from their four IDX files, as published."""
    folder = data_dir if data_dir is not None else paddle_cache(name)
    parts = {
        prefix: (
            read_idx(folder / f"{prefix}-images-idx3-ubyte.gz", dimensions=3),
            read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", dimensions=1),
        )
        for prefix in ("train", "t10k")
    }
    return Dataset(*(to_split(images, labels, folder) for images, labels in parts.values()))


def data_folder(name: str, data_dir: Path | None) -> Path | None:
    """Where a data set's files lie: as given, or in Paddle's cache, which is then filled; None if it has none."""
    return paddle_cache(name) if data_dir is None and name in IN_PADDLES_CACHE else data_dir


def paddle_cache(name: str) -> Path:
    """The folder where Paddle keeps this data set; has Paddle download what is missing."""
    from paddle.dataset.common import DATA_HOME
    from paddle.vision import datasets

    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[name]
    try:
        for mode in ("train", "test"):
            kind(mode=mode, download=True)
    except Exception as exc:  # Paddle raises RuntimeError, requests' errors and more
        raise DataError(
            f"{name} is not in Paddle's cache and could not be downloaded ({type(exc).__name__}); "
            "give the folder of its four IDX .gz files with --data-dir, or use --dataset digits"
        ) from exc
    return Path(DATA_HOME) / name


def read_gzip(path: Path, most: int = MOST_BYTES) -> bytes:
    """What is in it, at most so many bytes and one more: a small file may hold any number."""
    try:
        with gzip.open(path) as file:
            return file.read(most + 1)
    except FileNotFoundError as exc:
        raise DataError(f"no such file: {path}; --data-dir must name the folder that holds it") from exc
    except (OSError, EOFError, zlib.error) as exc:
        raise DataError(f"{path} is corrupt ({exc}); fetch it again") from exc


def read_idx(path: Path, *, dimensions: int) -> npt.NDArray[np.uint8]:
    """A gzipped IDX file of unsigned bytes (http://yann.lecun.com/exdb/mnist: magic, sizes, data; big-endian)."""
    content = read_gzip(path)
    if len(content) > MOST_BYTES:
        raise DataError(f"{path} holds more than {MOST_BYTES:,} bytes, which no data set here has; fetch it again")
    header = 4 + 4 * dimensions
    magic = 0x0800 | dimensions
    if len(content) < header or struct.unpack_from(">I", content)[0] != magic:
        raise DataError(f"{path} is corrupt: not an IDX file of {dimensions} dimension(s); fetch it again")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise DataError(f"{path} is corrupt: {len(content):,} bytes, expected {expected:,}; fetch it again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def to_split(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], source: Path) -> Split:
    if len(images) != len(labels) or images.shape[1:] != (SIDE, SIDE):
        raise DataError(
            f"{source}: {len(labels):,} labels for images {list(images.shape)}; expected [n, {SIDE}, {SIDE}]"
        )
    if labels.size and labels.max() >= CLASSES:
        raise DataError(f"{source}: label {labels.max()} found, expected 0..{CLASSES - 1}")
    return Split((images[:, None] / np.float32(255)).astype(np.float32), labels.astype(np.int64))


def load_mnist_json(data_dir: Path | None) -> Dataset:
    """The Paddle tutorial's mnist.json.gz: [train, validation, test], each [images of 784 floats, labels].

    Validation is left out: training and test split are used, as for the other sets.
    """
    if data_dir is None:
        raise UsageError("--dataset mnist-json needs --data-dir: the folder of mnist.json.gz, or the file itself")
    path = data_dir / "mnist.json.gz" if data_dir.is_dir() else data_dir
    try:
        train, _, test = json.loads(read_gzip(path))
        return Dataset(*(json_split(part) for part in (train, test)))
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise DataError(f"{path} is corrupt: not the tutorial's [train, validation, test] ({exc})") from exc


def json_split(part: Any) -> Split:
    images, labels = part
    split = Split(np.asarray(images, np.float32).reshape(-1, 1, SIDE, SIDE), np.asarray(labels, np.int64))
    if len(split.images) != len(split) or not np.isin(split.labels, range(CLASSES)).all():
        raise ValueError(f"{len(split):,} labels for {len(split.images):,} images; expected as many, 0..{CLASSES - 1}")
    return split


def rank_batches(split: Split, *, batch_size: int, rank: int, nranks: int) -> tuple[int, Iterator[Batch]]:
    """This rank's share of the split: how many batches an epoch has, and (images, labels) without end.

    Raises:
        UsageError: not one full batch a rank.
    """
    steps, batches = rank_indices(len(split), batch_size=batch_size, rank=rank, nranks=nranks)
    return steps, batches_of(split, batches)


def batches_of(split: Split, batches: Iterator[list[int]]) -> Iterator[Batch]:
    """(images, labels) of these samples."""
    return ((split.images[indices], split.labels[indices]) for indices in batches)


def rank_indices(count: int, *, batch_size: int, rank: int, nranks: int) -> tuple[int, Iterator[list[int]]]:
    """This rank's share of `count` samples: how many batches an epoch has, and the samples of each batch without end.

    Paddle's DistributedBatchSampler cuts and shuffles, anew each epoch; where nranks divides the number of
    samples, the ranks' batches of a step make up the one batch that a single process would take.

    Raises:
        UsageError: not one full batch a rank.
    """
    from paddle.io import DistributedBatchSampler

    sampler = DistributedBatchSampler(
        range(count), batch_size, num_replicas=nranks, rank=rank, shuffle=True, drop_last=True
    )
    if not len(sampler):
        raise UsageError(
            f"{nranks} ranks of --batch-size {batch_size} need {nranks * batch_size:,} samples a step, "
            f"the data set has {count:,}"
        )

    def batches() -> Iterator[list[int]]:
        while True:
            yield from sampler

    return len(sampler), batches()
