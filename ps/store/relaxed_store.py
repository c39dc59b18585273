"""A server's state where trainers need not be at the same step: ssp, async and geo, each out of `store.py`'s parts.

As there: no gRPC, no thread and no clock, and whatever does not fit is refused and changes nothing. What is read in a
trainer's memory is copied from there as it becomes final, for its commit may be answered, and its memory be written to,
before that is applied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.errors import ProtocolError, StaleEpoch
from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket
from common.tensors.updater import Updater
from ps.store.modes import Mode
from ps.store.shards import Shard, shard_of_bucket
from ps.store.store import Ending, Store

__all__ = ["AddDifference", "AsyncStore", "RelaxedStore", "SspStore", "make_relaxed_store"]


class RelaxedStore(ABC):
    """The parameters of one shard, and what each trainer has sent of the step it is at.

    Args:
        staleness: how many steps a trainer may be ahead of the slowest; None: any number.
        others: as of Store.
    """

    def __init__(
        self,
        shard: Shard,
        buckets: Sequence[Bucket],
        nranks: int,
        *,
        staleness: int | None,
        epoch: int = 0,
        helper: ThreadPoolExecutor | None = None,
    ) -> None:
        self.shard, self.nranks, self.staleness = shard, nranks, staleness
        self.updates = 0  # how many the parameters have seen
        self.steps = [0] * nranks  # how many each trainer has committed
        self.waiting: set[int] = set()  # whose last commit is not answered
        self.parameters, self.gradients = aligned_empty(shard.length), aligned_empty(shard.length)
        self._buckets, self._epoch, self._helper = buckets, epoch, helper
        self._elsewhere: dict[int, FloatArray] = {}  # where trainers have their gradients, to be copied from there
        self._made: list[Store] = []

    @abstractmethod
    def reduce(self, bucket: int) -> None:
        """Average a bucket that all trainers have delivered."""

    @abstractmethod
    def _store_of(self, rank: int) -> Store:
        """What takes the trainer's present step."""

    @abstractmethod
    def _apply(self, store: Store, updater: Updater) -> None:
        """All that this store waits for has been committed: update."""

    def read_in_place(self, rank: int, array: FloatArray) -> None:
        """A trainer's gradients of the shard lie in this memory, from now on: it only tells when they are final.

        Raises:
            ProtocolError: it has pushed words of a step that is not applied.
        """
        if rank not in self._elsewhere:
            for store in self._made:
                if rank in store.ranks:
                    store.read_in_place(rank, aligned_empty(self.shard.length))
        self._elsewhere[rank] = array

    def push(self, rank: int, epoch: int, step: int, bucket: int, start: int, data: FloatArray | int) -> bool:
        """Take gradients of one trainer, as `Store.push`; `step` counts its own.

        Returns:
            True if with this all trainers have delivered the bucket: the caller then calls `reduce`.
        """
        self.check(rank, epoch, step)
        if isinstance(data, int) != (rank in self._elsewhere):
            raise ProtocolError(f"rank {rank} pushed words at step {step} where they are not expected")
        store = self._store_of(rank)
        complete = store.push(rank, epoch, step, bucket, start, data)
        if isinstance(data, int):
            words = slice(start - self.shard.start, start - self.shard.start + data)
            store.contribution(rank)[words] = self._elsewhere[rank][words]
        return complete

    def commit(self, rank: int, epoch: int, step: int, ending: Ending, used: bytes, updater: Updater) -> Sequence[int]:
        """A trainer has pushed all of its step; what is complete with that is applied.

        Returns:
            the trainers that may now begin their next step, with the parameters as they are.

        Raises:
            StaleEpoch, ProtocolError, LayoutMismatch: as `Store.commit`; refused, nothing changed.
        """
        self.check(rank, epoch, step)
        if not ending.update or ending.again or ending.replaced:
            raise ProtocolError(f"rank {rank} asked for more than an update at step {step}, which only sync mode has")
        store = self._store_of(rank)
        complete = store.commit(rank, epoch, step, ending, used)
        self.steps[rank] += 1
        self.waiting.add(rank)
        if complete:
            self._apply(store, updater)
            self.updates += 1
        bound = self.staleness
        released = [r for r in sorted(self.waiting) if bound is None or self.steps[r] - bound <= self.updates]
        self.waiting.difference_update(released)
        return released

    def check(self, rank: int, epoch: int, step: int) -> None:
        """
        Raises:
            StaleEpoch, ProtocolError: the trainer has not just begun, or is not within, its step of that number.
        """
        if epoch != self._epoch:
            raise StaleEpoch(f"rank {rank} sent a message of epoch {epoch}, this is epoch {self._epoch}")
        if rank in self.waiting:
            raise ProtocolError(f"rank {rank} sent more before its commit of step {self.steps[rank] - 1} was answered")
        if step != self.steps[rank]:
            raise ProtocolError(f"rank {rank} sent step {step}, it is at step {self.steps[rank]}")

    def waiting_for(self) -> list[int]:
        """The trainers that those in `waiting` wait for."""
        return [rank for rank, steps in enumerate(self.steps) if steps == self.updates] if self.waiting else []

    def misses(self, gone: set[int]) -> bool:
        """Whether others have committed a step that is never complete without trainers that have left."""
        return self.staleness is not None and any(self.steps[rank] < max(self.steps) for rank in gone)

    def _make(self, step: int, ranks: Sequence[int]) -> Store:
        """A store of our parameters for one step of these trainers."""
        store = Store(self.shard, self._buckets, self.nranks, epoch=self._epoch, helper=self._helper, ranks=ranks)
        store.step = step
        store.keep_parameters_in(self.parameters)
        store.gradients = self.gradients
        self._made.append(store)
        return store


class SspStore(RelaxedStore):
    """Step t is averaged as in sync once all trainers have committed it, and steps are applied in order.

    A trainer may begin step t when step t-1-s is applied, so contributions of s+1 steps are kept: step t's in store
    t mod (s+1). All may use one buffer for the average: when all have delivered a bucket of step t+1, all have
    committed step t, which is applied by then.
    """

    def __init__(self, *args: Any, staleness: int, **options: Any) -> None:
        super().__init__(*args, staleness=staleness, **options)
        self._window = [self._make(step, range(self.nranks)) for step in range(staleness + 1)]

    def reduce(self, bucket: int) -> None:
        self._window[self.updates % len(self._window)].reduce(bucket)

    def _store_of(self, rank: int) -> Store:
        return self._window[self.steps[rank] % len(self._window)]

    def _apply(self, store: Store, updater: Updater) -> None:
        store.update(updater)
        store.step += len(self._window) - 1


class AsyncStore(RelaxedStore):
    """Every trainer's step is applied when it commits it, and by itself; which of two is first is left to chance."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, staleness=None, **options)
        self._stores = [self._make(0, [rank]) for rank in range(self.nranks)]

    def reduce(self, bucket: int) -> None:
        """Nothing is averaged; a trainer's words are taken when it commits."""

    def _store_of(self, rank: int) -> Store:
        return self._stores[rank]

    def _apply(self, store: Store, updater: Updater) -> None:
        for bucket in range(len(self._buckets)):
            store.reduce(bucket)  # of one: a copy
        store.update(updater)


class AddDifference:
    """The update of geo: a trainer's parameters have changed by `gradients` since it read the servers'. Added is a
    part in `nranks` of that, so that all trainers together move the parameters by the mean of their changes."""

    def __init__(self, store: RelaxedStore, buckets: Sequence[Bucket]) -> None:
        self._runs = []
        for bucket in buckets:
            part, base = shard_of_bucket(store.shard, bucket), store.shard.start
            run = slice(part.start - base, part.stop - base)
            self._runs.append((store.parameters[run].view(bucket.dtype), store.gradients[run].view(bucket.dtype)))
        self._nranks = store.nranks

    def step(self, learning_rate: float, used: bytes = b"") -> None:  # noqa: ARG002 - the trainer has used them
        for parameters, difference in self._runs:
            parameters += difference * parameters.dtype.type(1 / self._nranks)


def make_relaxed_store(mode: Mode, *args: Any, **options: Any) -> RelaxedStore:
    """The store of a mode other than sync, with the arguments of RelaxedStore."""
    if mode.staleness is not None:
        return SspStore(*args, staleness=mode.staleness, **options)
    return AsyncStore(*args, **options)
