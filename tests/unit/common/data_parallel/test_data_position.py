"""A training comes back to where it was in its data: the same batches follow, and the same random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler, IterableDataset  # noqa: E402

from common.errors import UsageError  # noqa: E402
from common.paddle_api.data_position import DataPosition  # noqa: E402
from common.paddle_api.random_states import random_arrays, set_random  # noqa: E402

EPOCHS, BATCHES = 2, 3


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = random_arrays()
    yield
    set_random(before)


class Numbers(Dataset):  # type: ignore[misc]
    def __init__(self, noise: bool) -> None:
        self._noise = noise

    def __getitem__(self, index: int) -> Any:
        return np.float64(index + (np.random.rand() + random.random() if self._noise else 0))

    def __len__(self) -> int:
        return 2 * BATCHES


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return iter(np.arange(2.0 * BATCHES))


def shuffled(noise: bool, workers: int) -> DataLoader:
    data = Numbers(noise)
    sampler = DistributedBatchSampler(data, 2, num_replicas=1, rank=0, shuffle=True)
    return DataLoader(data, batch_sampler=sampler, num_workers=workers)


LOADERS = {
    "list": lambda: list(range(BATCHES)),
    "distributed": lambda: shuffled(False, 0),
    "random transforms": lambda: shuffled(True, 0),
    "random transforms in workers": lambda: shuffled(True, 2),
    "random sampler": lambda: DataLoader(
        data := Numbers(False), batch_sampler=BatchSampler(data, shuffle=True, batch_size=2)
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
}


def train(position: DataPosition, loader: Iterable[Any], *, draw: bool) -> tuple[list[Any], list[Any]]:
    """What each step saw and drew, and what a commit after it keeps; last, what was drawn after all steps."""
    seen, kept = [], []

    def drawn() -> Any:
        return paddle.rand([2]).numpy().tolist(), (np.random.rand(), random.random()) if draw else ()

    while (epoch := position.epoch) < EPOCHS:
        for batch in position.batches(loader):
            values = np.asarray(batch[0] if isinstance(batch, list) else batch).tolist()
            seen.append((epoch, values, drawn()))
            position.done(loader)
            kept.append((position.state(), position.began(), random_arrays()))
        position.end(epoch)
    position.at_end()
    seen.append(drawn())
    return seen, kept


@pytest.mark.parametrize("kind", LOADERS)
def test_what_follows_is_what_followed(kind: str) -> None:
    draw = kind != "random transforms"  # they are drawn ahead of the loop, in a thread: whoever comes first
    paddle.seed(1)
    np.random.seed(2)
    random.seed(3)
    seen, kept = train(DataPosition(), LOADERS[kind](), draw=draw)
    assert len(kept) == EPOCHS * BATCHES
    for done in range(1, len(kept) + 1):
        paddle.seed(4)
        np.random.seed(5)
        random.seed(6)
        position = DataPosition()
        position.load(*kept[done - 1])
        assert train(position, LOADERS[kind](), draw=draw)[0] == seen[done:], f"after {done} steps"


def test_a_sampler_may_be_named() -> None:
    sampler = DistributedBatchSampler(Numbers(False), 2, num_replicas=1, rank=0, shuffle=True)
    sampler.set_epoch(5)
    position = DataPosition(sampler)
    next(position.batches(iter([1, 2])))
    assert position.state() == {"epoch": 0, "batch": 0, "sampler_epoch": 5}
    again = DistributedBatchSampler(Numbers(False), 2, num_replicas=1, rank=0, shuffle=True)
    resumed = DataPosition(again)
    resumed.load({"epoch": 1, "batch": 0, "sampler_epoch": 7}, {}, random_arrays())
    next(resumed.batches([1, 2]))
    assert again.epoch == 7


def test_a_loader_with_fewer_batches_is_refused() -> None:
    position = DataPosition()
    position.load({"epoch": 0, "batch": 2, "sampler_epoch": None}, random_arrays(), random_arrays())
    with pytest.raises(UsageError, match="the commit is of batch 2 of epoch 0, which now has 1; give the loader"):
        next(position.batches([1]))
