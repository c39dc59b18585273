"""The collective scheme: every rank keeps a full copy, and the ranks average their gradients in a ring."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from collective.algorithm import Watch
from collective.group import Group
from common.commit.slices import Slice, cut
from common.errors import LayoutMismatch, UsageError
from common.sync.guard import UNGUARDED, Guard
from common.sync.overlap import BucketRunner, BucketThread
from common.sync.synchronizer import Synchronizer, kind_of
from common.sync.trace import FINISH
from common.tensors.arena import Arena, FloatArray
from common.tensors.buckets import Bucket, chunk_bounds, words
from common.tensors.optimizers import Optimizer
from common.tensors.reduction import WORTH_PREPARING
from common.tensors.updater import make_flat_updater

__all__ = ["RingSynchronizer"]


WORTH_WATCHING = 4 << 20  # bytes; what is smaller has been in the cache just now, and its call is the quicker one


@dataclass(frozen=True)
class WatchedBucket(Watch):
    """While a bucket is averaged, for a guard that only warns."""

    guard: Guard
    bucket: int
    step: int

    def look(self) -> None:
        self.guard.look(self.bucket, self.step)

    def saw(self, rank: int, elements: slice) -> None:
        self.guard.saw(self.bucket, self.step, rank, elements)


class RingSynchronizer(Synchronizer):
    """All-reduces each bucket as it becomes final, then updates the whole arena with the rank's own optimizer.

    All ranks must start the buckets of all models in one order. While there is one model, its buckets are reduced
    beside backward, in the order that `launch_in` gave; with several, whose hooks may mingle, each model's when it
    finishes.

    Args:
        first: of the same group, whose thread this one shares; None: this is the first one.
        shard_optimizer: each bucket is only reduce-scattered; a rank updates its chunk of every bucket, and then the
            chunks are gathered; ranks that can share one copy of the parameters need not gather them. The
            same bits; optimizer time and state divided by nranks.
        connect: joins a group that comes after this one, where it meets; None: this one is the last.
    """

    scheme = "ring"

    def __init__(
        self,
        group: Group,
        *,
        overlap: bool = True,
        shard_optimizer: bool = False,
        first: RingSynchronizer | None = None,
        connect: Callable[[str], Group] | None = None,
    ) -> None:
        self._group, self._first = group, first or self
        self._sharded = self.own_optimizer = shard_optimizer
        self._connect, self.can_rejoin = connect, connect is not None
        self._runner: BucketRunner | None = None
        self._models: WeakSet[RingSynchronizer] = WeakSet()  # of the group; kept by the first one
        self._thread: BucketThread | None = first._thread if first else BucketThread() if overlap else None
        self.backend, self.rank, self.nranks = group.backend, group.rank, group.nranks
        self.messenger = group.messenger

    def empty(self, count: int) -> FloatArray:
        return self._group.empty(count)

    def attach(self, arena: Arena, optimizer: Optimizer | None) -> None:
        self._agree(arena, optimizer)
        self._group.broadcast(arena.parameters)
        self._one_copy = self._sharded and optimizer is not None and self._group.share(arena.parameters)
        self._arena = arena
        self.trace.name_buckets([4 * bucket.length for bucket in arena.buckets])
        if self._sharded and optimizer is None:
            raise UsageError("--shard-optimizer needs the built-in trainer: a program of your own updates by itself")
        whole = slice(0, arena.layout.length)
        mine = [self._own_part_of(bucket) for bucket in arena.buckets] if self._sharded else [whole]
        self._mine = mine if optimizer else []
        self._updaters = [make_flat_updater(optimizer, arena.parameters[s], arena.gradients[s]) for s in self._mine]
        self._step = 0
        self._first._models.add(self)
        self._runner = BucketRunner(
            len(arena.buckets),
            self._reduce,
            overlap=self._thread is not None,
            thread=self._thread,
            beside=self._first._has_one_model,
        )

    def mark_ready(self, bucket: int) -> None:
        self.trace.moment("ready", bucket)
        self._attached().mark_ready(bucket)

    def launch_in(self, order: Sequence[int]) -> None:
        self._attached().order.follow(order)

    def finish(self, learning_rate: float) -> None:
        with self.trace.span(FINISH):
            self._attached().finish()
            self.guard.compare_notes(self._group.all_gather, self._step, whole=not self._sharded)
            if self._one_copy:
                self._group.barrier()  # nobody's backward reads parameters any longer
            if self._updaters:
                with self.trace.span("update"):
                    for updater in self._updaters:
                        updater.step(learning_rate)
            if self._sharded:
                with self.trace.span("gather"):
                    self._gather_parameters()
        self._step += 1

    def optimizer_slices(self, *, everyone: bool = False) -> list[Slice]:
        if self.rank > 0 and not (self._sharded or everyone):
            return []
        parts = zip(self._mine, self._updaters, strict=True)
        return [Slice(s.start, s.stop, updater.arrays()) for s, updater in parts if s.start < s.stop]

    def load_optimizer(self, slices: Sequence[Slice]) -> None:
        for s, updater in zip(self._mine, self._updaters, strict=True):
            updater.load(cut(slices, s.start, s.stop).arrays)

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._group.all_gather(values)

    def all_reduce(self, array: npt.NDArray[Any], op: str) -> None:
        if array.nbytes < WORTH_PREPARING:  # a loop for each dtype and op of a program's is not worth compiling
            super().all_reduce(array, op)
        else:
            self._group.all_reduce(array, op, bucket=kind_of(array, op))

    def broadcast(self, array: npt.NDArray[Any], root: int) -> None:
        self._group.broadcast(array, root)

    def leave(self, reason: str) -> None:
        self._group.close(reason)
        self._runner = None

    def rejoin(self, rendezvous: str) -> None:
        assert self._connect
        self._group = self._connect(rendezvous)
        self.messenger = self._group.messenger

    def another(self) -> RingSynchronizer:
        return RingSynchronizer(self._group, shard_optimizer=self._sharded, first=self._first)

    def close(self, reason: str = "") -> None:
        if self._first is not self:
            self._first._models.discard(self)
            return
        self._group.close(reason)
        self.guard = UNGUARDED
        if self._thread:
            self._thread.close()

    def _has_one_model(self) -> bool:
        return len(self._models) == 1

    def _attached(self) -> BucketRunner:
        if self._runner is None:
            raise RuntimeError("attach an arena first")
        return self._runner

    def _gather_parameters(self) -> None:
        if self._one_copy:
            self._group.barrier()
            return
        for number, bucket in enumerate(self._arena.buckets):
            parameters = self._arena.parameters[bucket.start : bucket.stop].view(bucket.dtype)
            self._group.gather_chunks(parameters, step=self._step, bucket=number)

    def _reduce(self, bucket: int) -> None:
        where = self._arena.buckets[bucket]
        gradients = self._arena.gradients[where.start : where.stop].view(where.dtype)
        with self.trace.span("reduce", bucket):
            if gradients.nbytes >= WORTH_WATCHING and self.guard.only_warns and not self._sharded:
                watch = WatchedBucket(self.guard, bucket, self._step)
                self._group.all_reduce(gradients, "mean", step=self._step, bucket=bucket, watch=watch)
                return
            if self.guard.look(bucket, self._step):
                self.guard.spoil(bucket)
            self._average(gradients, bucket)

    def _average(self, gradients: npt.NDArray[Any], bucket: int) -> None:
        """Replace a bucket's gradients, or this rank's chunk of them, by their mean over ranks."""
        reduce = self._group.reduce_scatter if self._sharded else self._group.all_reduce
        reduce(gradients, "mean", step=self._step, bucket=bucket)

    def _own_part_of(self, bucket: Bucket) -> slice:
        """What this rank updates of a bucket, in words: the chunk that reduce-scatter leaves with it."""
        word = words(bucket.dtype)
        start, stop = chunk_bounds(bucket.length // word, self.nranks)[self.rank]
        return slice(bucket.start + start * word, bucket.start + stop * word)

    def _agree(self, arena: Arena, optimizer: Optimizer | None) -> None:
        """Compare what all ranks are about to do."""
        mine: dict[str, list[Any]] = {
            "layout": [[s.name, list(s.shape), s.dtype] for s in arena.layout.slots],
            "buckets": [[b.start, b.stop] for b in arena.buckets],
            "optimizer": [optimizer.name, asdict(optimizer)] if optimizer else [],
            "sharding": [self._sharded],
            "handling of gradients that are not finite": [self.guard.refuses],
        }
        text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        lengths = self._group.all_gather(np.array([text.size], np.int64))[:, 0]
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: text.size] = text
        everyone = self._group.all_gather(padded)
        for rank, (row, length) in enumerate(zip(everyone, lengths, strict=True)):
            theirs = json.loads(row[:length].tobytes())
            for what in mine:
                if theirs[what] != mine[what]:
                    raise LayoutMismatch(
                        f"rank {self.rank} and rank {rank} disagree on the {what}: "
                        f"{_first_difference(mine[what], theirs[what])}; give all ranks the same model and flags"
                    )


def _first_difference(mine: list[Any], theirs: list[Any]) -> str:
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            return f"{a} against {b}"
    return f"{len(mine)} against {len(theirs)} entries"
