"""The data sets, the files they come from when these are broken, and the split over ranks."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError, UsageError
from common.trainer.data import Split, load_dataset, rank_batches, read_gzip

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
PUBLISHED_MD5 = {
    "mnist": {
        TRAIN_IMAGES: "6bbc9ace898e44ae57da46a324031adb",
        TRAIN_LABELS: "a25bea736e30d166cdddb491f175f624",
        TEST_IMAGES: "2646ac647ad5339dbf082846283269ea",
        TEST_LABELS: "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion-mnist": {
        TRAIN_IMAGES: "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        TRAIN_LABELS: "9018921c3c673c538a1fc5bad174d6f9",
        TEST_IMAGES: "8181f5470baa50b63fa0f6fddb340f0a",
        TEST_LABELS: "15d484375f8d13e6eb1aabb0c3f46965",
    },
}


# Digits and synthetic


def test_digits_have_1440_and_357_images() -> None:
    data = load_dataset("digits")
    assert (len(data.train), len(data.test)) == (1440, 357)
    for split in (data.train, data.test):
        assert split.images.shape == (len(split), 1, 28, 28)
        assert split.images.dtype == np.float32
        assert split.labels.dtype == np.int64
        assert (split.images.min(), split.images.max()) == (0, 1)
        assert set(split.labels.tolist()) == set(range(10))


def test_digits_are_always_the_same_bits() -> None:
    """Those that scikit-learn gave, before they were a file of ours."""
    data, digest = load_dataset("digits"), hashlib.sha256()
    for split in (data.train, data.test):
        digest.update(split.images.tobytes())
        digest.update(split.labels.tobytes())
    assert digest.hexdigest() == "6fbc5e60123ede66cbcbc54884ecb73e3be26bb98ef4eabe1362bd22509ada9c"


def test_a_digit_is_grown_inside_a_border() -> None:
    image = load_dataset("digits").train.images[0, 0]
    assert not image[[0, 1, 26, 27]].any()
    assert not image[:, [0, 1, 26, 27]].any()
    blocks = image[2:26, 2:26].reshape(8, 3, 8, 3)
    assert (blocks == blocks[:, :1, :, :1]).all()


def test_synthetic_images_depend_on_the_seed_alone() -> None:
    first, again, other = (load_dataset("synthetic", seed=seed) for seed in (5, 5, 6))
    assert (len(first.train), len(first.test)) == (6000, 1000)
    assert first.train.images.shape == (6000, 1, 28, 28)
    assert first.train.images.dtype == np.float32
    assert 0 <= first.train.images.min() < first.train.images.max() <= 1
    np.testing.assert_array_equal(first.train.images, again.train.images)
    np.testing.assert_array_equal(first.test.labels, again.test.labels)
    assert not np.array_equal(first.train.images, other.train.images)


def test_synthetic_images_can_be_told_apart() -> None:
    data = load_dataset("synthetic")
    means = np.stack([data.train.images[data.train.labels == k].mean(0) for k in range(10)])
    distance = ((data.test.images[:, None] - means[None]) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == data.test.labels).mean() > 0.99


# IDX files


def idx(array: np.ndarray, *, magic: int | None = None) -> bytes:
    kind = 0x0800 | array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", kind, *array.shape) + array.astype(np.uint8).tobytes()


def images_of(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 28, 28))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """23 + 7 images in the four IDX files."""
    for images, labels, count in ((TRAIN_IMAGES, TRAIN_LABELS, 23), (TEST_IMAGES, TEST_LABELS, 7)):
        (tmp_path / images).write_bytes(gzip.compress(idx(images_of(count, count))))
        (tmp_path / labels).write_bytes(gzip.compress(idx(np.arange(count) * 3 % 10)))
    return tmp_path


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_read_as_written(name: str, folder: Path) -> None:
    data = load_dataset(name, folder)
    for split, count in ((data.train, 23), (data.test, 7)):
        assert split.images.dtype == np.float32
        expected = (images_of(count, count)[:, None] / np.float32(255)).astype(np.float32)
        np.testing.assert_array_equal(split.images, expected)
        np.testing.assert_array_equal(split.labels, np.arange(count) * 3 % 10)
        assert split.labels.dtype == np.int64


def test_empty_idx_files_are_an_empty_data_set(folder: Path) -> None:
    (folder / TEST_IMAGES).write_bytes(gzip.compress(idx(np.zeros((0, 28, 28)))))
    (folder / TEST_LABELS).write_bytes(gzip.compress(idx(np.zeros(0))))
    assert len(load_dataset("mnist", folder).test) == 0


Spoil = Callable[[Path], object]
BROKEN: dict[str, tuple[str, Spoil, str]] = {
    "missing": (TEST_LABELS, Path.unlink, "no such file: {}; --data-dir must name the folder that holds it"),
    "empty": (TRAIN_IMAGES, lambda p: p.write_bytes(b""), "{} is corrupt"),
    "not gzip": (TRAIN_IMAGES, lambda p: p.write_bytes(b"plain text"), "{} is corrupt (Not a gzipped file"),
    "cut off": (TRAIN_IMAGES, lambda p: p.write_bytes(p.read_bytes()[:-20]), "{} is corrupt"),
    "a bit flipped": (TEST_IMAGES, lambda p: p.write_bytes(flipped(p.read_bytes(), 300)), "{} is corrupt"),
    "bad checksum": (TEST_IMAGES, lambda p: p.write_bytes(flipped(p.read_bytes(), -8)), "{} is corrupt (CRC check"),
    "wrong magic": (
        TRAIN_LABELS,
        lambda p: p.write_bytes(gzip.compress(idx(np.arange(23) % 10, magic=0x0D01))),
        "{} is corrupt: not an IDX file of 1 dimension(s); fetch it again",
    ),
    "labels for images": (
        TRAIN_IMAGES,
        lambda p: p.write_bytes(gzip.compress(idx(np.arange(23) % 10))),
        "{} is corrupt: not an IDX file of 3 dimension(s); fetch it again",
    ),
    "no header": (TEST_LABELS, lambda p: p.write_bytes(gzip.compress(b"\0\0\x08\x01")), "{} is corrupt: not an IDX"),
    "too short": (
        TRAIN_LABELS,
        lambda p: p.write_bytes(gzip.compress(idx(np.arange(23) % 10)[:-1])),
        "{} is corrupt: 30 bytes, expected 31; fetch it again",
    ),
    "too long": (
        TEST_IMAGES,
        lambda p: p.write_bytes(gzip.compress(idx(images_of(7, 7)) + b"\0")),
        "{} is corrupt: 5,505 bytes, expected 5,504; fetch it again",
    ),
}


def flipped(content: bytes, position: int) -> bytes:
    array = bytearray(content)
    array[position] ^= 1
    return bytes(array)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(name: str, folder: Path) -> None:
    file, spoil, message = BROKEN[name]
    spoil(folder / file)
    with pytest.raises(DataError) as caught:
        load_dataset("mnist", folder)
    assert str(caught.value).startswith(message.format(folder / file))


@pytest.mark.parametrize(
    ("file", "array", "message"),
    [
        (TRAIN_LABELS, np.arange(23) % 11, "label 10 found, expected 0..9"),
        (TEST_LABELS, np.full(7, 255), "label 255 found, expected 0..9"),
        (TRAIN_LABELS, np.arange(22) % 10, "22 labels for images [23, 28, 28]; expected [n, 28, 28]"),
        (TRAIN_IMAGES, np.zeros((23, 28, 27)), "23 labels for images [23, 28, 27]; expected [n, 28, 28]"),
    ],
)
def test_contents_that_do_not_fit_name_the_folder(file: str, array: np.ndarray, message: str, folder: Path) -> None:
    (folder / file).write_bytes(gzip.compress(idx(array)))
    with pytest.raises(DataError) as caught:
        load_dataset("mnist", folder)
    assert str(caught.value) == f"{folder}: {message}"


def test_a_download_that_fails_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("paddle.vision").datasets

    def refuse(**_: object) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "MNIST", refuse)
    with pytest.raises(DataError, match=r"mnist is not in Paddle's cache .*\(ConnectionError\); .*--data-dir.*digits"):
        load_dataset("mnist")


# The tutorial's JSON


def json_part(count: int, seed: int) -> list[list]:
    images = np.random.default_rng(seed).random((count, 784), np.float32).round(4)
    return [images.tolist(), [i * 7 % 10 for i in range(count)]]


def write_json(path: Path, content: object) -> Path:
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


@pytest.mark.parametrize("by_file", [True, False], ids=["file", "folder"])
def test_the_tutorials_json(by_file: bool, tmp_path: Path) -> None:
    parts = [json_part(5, 1), json_part(2, 2), json_part(3, 3)]
    path = write_json(tmp_path / "mnist.json.gz", parts)
    data = load_dataset("mnist-json", path if by_file else tmp_path)
    for split, (images, labels) in ((data.train, parts[0]), (data.test, parts[2])):
        assert split.images.shape == (len(labels), 1, 28, 28)
        np.testing.assert_array_equal(split.images.reshape(-1, 784), np.float32(images))
        assert split.labels.tolist() == labels
        assert split.labels.dtype == np.int64


def test_the_json_needs_a_folder() -> None:
    with pytest.raises(UsageError, match="--dataset mnist-json needs --data-dir"):
        load_dataset("mnist-json")


def test_a_missing_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"no such file: {tmp_path / 'mnist.json.gz'}")):
        load_dataset("mnist-json", tmp_path)


GOOD = [[[0.5] * 784], [3]]
BAD_JSON = {
    "two parts": [GOOD, GOOD],
    "an object": {"train": GOOD},
    "a number": 5,
    "images only": [GOOD, GOOD, GOOD[:1]],
    "image of 783": [[[[0.5] * 783], [3]], GOOD, GOOD],
    "words": [[["abc"], [3]], GOOD, GOOD],
    "label 10": [[[[0.5] * 784], [10]], GOOD, GOOD],
    "negative label": [GOOD, GOOD, [[[0.5] * 784], [-1]]],
    "more labels than images": [[[[0.5] * 784], [3, 4]], GOOD, GOOD],
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_a_json_of_another_shape_is_named(name: str, tmp_path: Path) -> None:
    path = write_json(tmp_path / "mnist.json.gz", BAD_JSON[name])
    with pytest.raises(DataError, match=re.escape(str(path))):
        load_dataset("mnist-json", tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b""], ids=["cut", "not UTF-8", "empty"])
def test_a_file_that_is_no_json_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mnist.json.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=re.escape(f"{path} is corrupt: not the tutorial's")):
        load_dataset("mnist-json", tmp_path)


# The real files


@pytest.mark.parametrize("name", PUBLISHED_MD5)
def test_the_real_files_are_the_published_ones(name: str, data_dir: Path) -> None:
    found = {
        file: hashlib.md5(gzip.decompress((data_dir / name / file).read_bytes())).hexdigest()
        for file in PUBLISHED_MD5[name]
    }
    assert found == PUBLISHED_MD5[name]


@pytest.mark.parametrize(("name", "first"), [("mnist", [5, 0, 4, 1, 9]), ("fashion-mnist", [9, 0, 0, 3, 0])])
def test_the_real_data_sets(name: str, first: list[int], data_dir: Path) -> None:
    data = load_dataset(name, data_dir / name)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert data.train.images.shape == (60_000, 1, 28, 28)
    assert (data.train.images.min(), data.train.images.max()) == (0, 1)
    assert data.train.labels[:5].tolist() == first
    assert set(data.test.labels.tolist()) == set(range(10))


# Shares of ranks


def numbered(count: int) -> Split:
    """Images and labels that hold their own number."""
    labels = np.arange(count)
    return Split(np.full((count, 1, 2, 2), labels.reshape(-1, 1, 1, 1), np.float32), labels)


def labels_of(split: Split, steps: int, *, batch_size: int, rank: int, nranks: int) -> list[list[int]]:
    """The labels of the first steps' batches; images must belong to them."""
    _, batches = rank_batches(split, batch_size=batch_size, rank=rank, nranks=nranks)
    found = []
    for images, labels in itertools.islice(batches, steps):
        assert images.shape == (batch_size, 1, 2, 2)
        assert (images[:, 0, 1, 1] == labels).all()
        found.append(labels.tolist())
    return found


@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 6])
def test_the_ranks_batches_make_up_a_single_process_batch(nranks: int) -> None:
    pytest.importorskip("paddle")
    split, steps = numbered(120), 17  # of 5 or more steps an epoch, so over its end
    size = 24 // nranks
    ranks = [labels_of(split, steps, batch_size=size, rank=rank, nranks=nranks) for rank in range(nranks)]
    together = [[label for rank in ranks for label in rank[step]] for step in range(steps)]
    assert together == labels_of(split, steps, batch_size=24, rank=0, nranks=1)


def test_an_epoch_takes_every_sample_once_in_an_order_of_its_own() -> None:
    pytest.importorskip("paddle")
    batches = labels_of(numbered(60), 10, batch_size=12, rank=0, nranks=1)
    first, second = (list(itertools.chain(*batches[i : i + 5])) for i in (0, 5))
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second
    assert first != sorted(first)


def test_equal_calls_give_equal_batches() -> None:
    pytest.importorskip("paddle")
    calls = [labels_of(numbered(97), 9, batch_size=7, rank=1, nranks=3) for _ in range(2)]
    assert calls[0] == calls[1]


@pytest.mark.parametrize(
    ("count", "batch_size", "nranks", "expected"),
    [(120, 24, 1, 5), (120, 8, 3, 5), (127, 8, 3, 5), (24, 8, 3, 1), (1440, 32, 2, 22), (23, 1, 23, 1), (1, 1, 1, 1)],
)
def test_steps_of_an_epoch_are_full_batches_only(count: int, batch_size: int, nranks: int, expected: int) -> None:
    pytest.importorskip("paddle")
    for rank in (0, nranks - 1):
        assert rank_batches(numbered(count), batch_size=batch_size, rank=rank, nranks=nranks)[0] == expected


@pytest.mark.parametrize(("count", "batch_size", "nranks"), [(1440, 721, 2), (7, 8, 1), (100, 51, 2)])
def test_a_data_set_without_one_batch_a_rank(count: int, batch_size: int, nranks: int) -> None:
    pytest.importorskip("paddle")
    message = (
        f"{nranks} ranks of --batch-size {batch_size} need {batch_size * nranks:,} samples a step, "
        f"the data set has {count:,}"
    )
    with pytest.raises(UsageError) as caught:
        rank_batches(numbered(count), batch_size=batch_size, rank=0, nranks=nranks)
    assert str(caught.value) == message


def test_of_a_file_that_holds_far_more_than_it_should_no_more_is_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "bomb.gz", "wb") as file:
        file.write(bytes(1 << 24))
    assert len(read_gzip(tmp_path / "bomb.gz", 1000)) == 1001
