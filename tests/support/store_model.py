"""A store's updates and averages in plain NumPy, and how to play steps on a store."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from common.errors import GradSyncError
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket, words
from ps.store.ending import Ending
from ps.store.shards import Shard, shard_of_bucket
from ps.store.step_state import StepState
from ps.store.update_for_built_in import UpdateInPieces

__all__ = [
    "AGAIN",
    "AVERAGE",
    "EPOCH",
    "LENGTH",
    "MIXED",
    "PLAN",
    "REPLACED",
    "UPDATE",
    "NumpySGD",
    "canonical_mean",
    "deliver",
    "end",
    "everything_in",
    "gradients_of",
    "in_pieces",
    "initial_parameters",
    "make_store",
    "mixed_plans",
    "new_values",
    "one",
    "parameters_after",
    "plans",
    "play_step",
    "push_all",
    "rate_of",
    "refused",
    "updated",
]

EPOCH = 3


class NumpySGD:
    """The smallest updater: p -= lr * g, in the type of each bucket."""

    def __init__(self, store: StepState) -> None:
        self.parameters, self.gradients = store.parameters, store.gradients  # kept by reference, as Paddle's do
        parts = [shard_of_bucket(store.shard, bucket) for bucket in store.buckets]
        self.slices = [
            (slice(p.start - store.shard.start, p.stop - store.shard.start), b.dtype)
            for p, b in zip(parts, store.buckets, strict=True)
        ]
        self.used: list[bytes] = []  # what it has been told of, step by step

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        self.used.append(used)
        for where, dtype in self.slices:
            rate = np.dtype(dtype).type(learning_rate)
            self.parameters[where].view(dtype)[...] -= rate * self.gradients[where].view(dtype)


class PieceSGD:
    """As NumpySGD, of one piece at a time."""

    def __init__(self, store: StepState) -> None:
        self.parameters, self.pieces = store.parameters, {piece.start: piece for piece in store.contributions.pieces()}
        self.dtypes = [bucket.dtype for bucket in store.buckets]

    def set_rate(self, learning_rate: float) -> None:
        self.rate = learning_rate

    def step(self, start: int, gradients: FloatArray) -> None:
        piece = self.pieces[start]
        parameters = self.parameters[start : piece.stop].view(self.dtypes[piece.bucket])
        parameters -= parameters.dtype.type(self.rate) * gradients.view(parameters.dtype)


def in_pieces(store: StepState, helper: ThreadPoolExecutor | None = None) -> UpdateInPieces:
    return UpdateInPieces(store.contributions, PieceSGD(store), helper=helper)


def rate_of(step: int) -> float:
    return 0.1 / (1 + step)


@functools.cache
def gradients_of(rank: int, step: int, length: int, buckets: tuple[Bucket, ...] = ()) -> FloatArray:
    """Words of mixed magnitudes, so that another order of summation gives other bits; float64 where a bucket is."""
    random = np.random.default_rng([rank, step, length])
    values = random.standard_normal(length) * 10.0 ** random.integers(-3, 4, length)
    found = values.astype(np.float32)
    for b in buckets:
        if b.dtype == "float64":
            found[b.start : b.stop] = values[b.start : b.start + b.length // 2].view(np.float32)
    return found


def initial_parameters(length: int) -> FloatArray:
    return np.random.default_rng(length).standard_normal(length).astype(np.float32)


def canonical_mean(sources: list[FloatArray], bucket: Bucket) -> npt.NDArray[Any]:
    """A bucket's mean in its type: 16-element units dealt to N chunks, chunk c summed from rank c+1 round to c."""
    values = [source[bucket.start : bucket.stop].view(bucket.dtype) for source in sources]
    nranks, size = len(values), values[0].size
    chunk = np.arange(size) // 16 * nranks // max(-(-size // 16), 1)
    mean = np.zeros_like(values[0])
    for c in range(nranks):
        total = values[(c + 1) % nranks].copy()
        for i in range(2, nranks + 1):
            total = total + values[(c + i) % nranks]
        mean[chunk == c] = (total * total.dtype.type(1.0 / nranks))[chunk == c]
    return mean


def updated(parameters: FloatArray, gradients_step: int, rate: float, nranks: int, buckets: list[Bucket]) -> FloatArray:
    """The parameters after one update by the mean of that step's gradients."""
    after, length = parameters.copy(), parameters.size
    sources = [gradients_of(rank, gradients_step, length, tuple(buckets)) for rank in range(nranks)]
    for b in buckets:
        after[b.start : b.stop].view(b.dtype)[...] -= np.dtype(b.dtype).type(rate) * canonical_mean(sources, b)
    return after


def parameters_after(steps: int, nranks: int, buckets: list[Bucket], length: int) -> FloatArray:
    parameters = initial_parameters(length)
    for step in range(steps):
        parameters = updated(parameters, step, rate_of(step), nranks, buckets)
    return parameters


def make_store(shard: Shard, buckets: list[Bucket], nranks: int, length: int, **options: Any) -> StepState:
    store = StepState(shard, buckets, nranks, epoch=EPOCH, **options)
    store.parameters[...] = initial_parameters(length)[shard.start : shard.stop]
    return store


def everything_in(store: StepState) -> dict[str, Any]:
    return {**vars(store), "contributions": dict(vars(store.contributions))}


@contextmanager
def refused(store: StepState, *kinds: type[GradSyncError], text: str | None = None) -> Iterator[None]:
    """The block raises exactly one of `kinds`, and leaves the store as it was."""
    before = copy.deepcopy(everything_in(store))
    with pytest.raises(kinds, match=text) as caught:
        yield
    assert type(caught.value) in kinds
    np.testing.assert_equal(everything_in(store), before)


def deliver(store: StepState, rank: int, bucket: int, length: int, *, piece: int = 10**9) -> None:
    """Push the rest of a bucket in pieces, of one word more where that takes a whole element, and reduce it if it was
    the last."""
    part = shard_of_bucket(store.shard, store.buckets[bucket])
    piece += piece % words(store.buckets[bucket].dtype)
    gradients = gradients_of(rank, store.step, length, tuple(store.buckets))
    for start in range(part.start + store.contributions.delivered[rank][bucket], part.stop, piece):
        data = gradients[start : min(start + piece, part.stop)]
        if store.push(rank, EPOCH, store.step, bucket, start, data):
            store.reduce(bucket)


def play_step(store: StepState, length: int, *, piece: int = 10**9) -> None:
    for rank in range(store.nranks):
        for bucket in range(len(store.buckets)):
            deliver(store, rank, bucket, length, piece=piece)
    step = store.step
    for rank in range(store.nranks):
        if store.commit(rank, EPOCH, step, Ending(rate_of(step))):
            store.update(NumpySGD(store))


PLAN = [Bucket(48, 70), Bucket(16, 48), Bucket(0, 16)]
LENGTH = 70


one = np.ones(1, np.float32)


UPDATE, AVERAGE, AGAIN, REPLACED = (
    Ending(0.1),
    Ending(0.0, update=False),
    Ending(0.1, again=True),
    Ending(0.1, replaced=True),
)


def push_all(store: StepState) -> None:
    for rank in range(store.nranks):
        for bucket in range(len(store.buckets)):
            deliver(store, rank, bucket, LENGTH)


def end(store: StepState, ending: Ending, *, used: dict[int, bytes] | None = None) -> NumpySGD:
    """All commit; the step ends as they said."""
    updater, step = NumpySGD(store), store.step
    for rank in reversed(range(store.nranks)):
        complete = store.commit(rank, EPOCH, step, ending, (used or {}).get(rank, b""))
        assert complete == (rank == 0)
    assert store.ending == ending
    if ending.update:
        store.update(updater)
    else:
        store.average()
    assert store.step == step + 1
    return updater


def new_values(step: int, length: int) -> FloatArray:
    """What the program gives the parameters at a step."""
    return np.random.default_rng([77, step]).standard_normal(length).astype(np.float32)


MIXED = [Bucket(160, 224, "float64"), Bucket(96, 160, "float64"), Bucket(32, 96), Bucket(0, 32)]


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[Bucket]]:
    """An arena's length and its bucket plan, from the end to the start; cuts lie anywhere."""
    length = draw(st.integers(0, 130))
    edges = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=4))})
    return length, [Bucket(a, b) for a, b in pairwise(edges)][::-1]


@st.composite
def mixed_plans(draw: st.DrawFn) -> tuple[int, list[Bucket]]:
    """As of arenas: cut at cache lines, each bucket of either dtype."""
    units = sorted(draw(st.sets(st.integers(1, 9), max_size=4)))
    edges = [16 * unit for unit in [0, *units]]
    dtypes = st.sampled_from(["float32", "float64"])
    return edges[-1], [Bucket(a, b, draw(dtypes)) for a, b in pairwise(edges)][::-1]
