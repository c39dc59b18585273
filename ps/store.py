"""One server's state as a state machine: it knows no gRPC, no thread and no clock.

A step goes through three stages, in this order, whatever the order in which trainers are heard:

    push    every trainer delivers every element of the shard, bucket by bucket, exactly once
    reduce  a bucket that all trainers have delivered is averaged in the canonical order (common/reduction.py)
    commit  once all trainers have committed, the optimizer updates the shard, and the next step begins

Whatever does not fit (an old epoch, another step, an element twice, a commit with pushes missing) is refused
with an error and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.arena import FloatArray
from common.buckets import Bucket
from common.errors import LayoutMismatch, ProtocolError, StaleEpoch
from common.memory import aligned_empty
from common.reduction import reduce_bucket
from common.updater import Updater
from ps.shards import Shard, shard_of_bucket

__all__ = ["Store"]


class Store:
    """The parameters of one shard, and the gradients of the step under way.

    Args:
        shard: the slice of the arena; every `start` below counts from the arena's start, not the slice's.
        buckets: the whole arena's bucket plan.

    Memory: the shard's parameters and one gradient buffer a trainer.
    """

    def __init__(self, shard: Shard, buckets: Sequence[Bucket], nranks: int, *, epoch: int = 0) -> None:
        self.shard, self.nranks, self.epoch = shard, nranks, epoch
        self.step = 0
        self.parameters: FloatArray = aligned_empty(shard.length)
        self.parameters.fill(0)
        self._contributions: list[FloatArray] = [aligned_empty(shard.length) for _ in range(nranks)]
        self._buckets = list(buckets)
        self._parts = [shard_of_bucket(shard, bucket) for bucket in buckets]
        self._begin_step()

    @property
    def gradients(self) -> FloatArray:
        """Where the averaged gradients of the shard are found once all buckets are reduced."""
        return self._contributions[0]

    def push(self, rank: int, epoch: int, step: int, bucket: int, start: int, data: FloatArray) -> bool:
        """Take gradients of one trainer, in ascending order within a bucket.

        Returns:
            True if with this all trainers have delivered the bucket: the caller then calls `reduce`.

        Raises:
            StaleEpoch, ProtocolError: refused, nothing changed.
        """
        self._check(rank, epoch, step)
        if not 0 <= bucket < len(self._parts):
            raise ProtocolError(f"rank {rank} pushed bucket {bucket} of {len(self._parts)} at step {step}")
        part, done = self._parts[bucket], self._delivered[rank][bucket]
        if start != part.start + done or start + data.size > part.stop:
            raise ProtocolError(
                f"rank {rank} pushed elements {start}..{start + data.size} of bucket {bucket} at step {step}, "
                f"expected them from {part.start + done} up to {part.stop}"
            )
        at = start - self.shard.start
        self._contributions[rank][at : at + data.size] = data
        self._delivered[rank][bucket] += data.size
        if data.size and start + data.size == part.stop:
            self._complete[bucket] += 1
        return bool(data.size) and self._complete[bucket] == self.nranks

    def reduce(self, bucket: int) -> None:
        """Average a bucket that all trainers have delivered; the result replaces rank 0's contribution."""
        whole, part = self._buckets[bucket], self._parts[bucket]
        base = self.shard.start
        reduce_bucket(
            self._contributions,
            self.gradients,
            bucket_start=whole.start - base,
            bucket_length=whole.length,
            start=part.start - base,
            stop=part.stop - base,
        )

    def commit(self, rank: int, epoch: int, step: int, learning_rate: float) -> bool:
        """A trainer has pushed all of its step.

        Returns:
            True if all trainers have now: the caller then calls `update`.

        Raises:
            StaleEpoch, ProtocolError: refused, nothing changed.
            LayoutMismatch: the learning rate is not that of the other trainers.
        """
        self._check(rank, epoch, step)
        delivered = sum(self._delivered[rank])
        if delivered != self.shard.length:
            raise ProtocolError(f"rank {rank} committed step {step} after {delivered} of {self.shard.length} elements")
        for other, rate in self._committed.items():
            if rate != learning_rate:
                raise LayoutMismatch(
                    f"rank {rank} has learning rate {learning_rate} at step {step}, rank {other} has {rate}; "
                    "give all trainers the same --lr and scheduler"
                )
        self._committed[rank] = learning_rate
        return len(self._committed) == self.nranks

    def update(self, updater: Updater) -> None:
        """Apply the step's averaged gradients; the next step begins."""
        updater.step(next(iter(self._committed.values())))
        self.step += 1
        self._begin_step()

    def waiting_for(self) -> list[int]:
        """The trainers that have not committed the step under way."""
        return [rank for rank in range(self.nranks) if rank not in self._committed]

    def _begin_step(self) -> None:
        self._delivered = [[0] * len(self._parts) for _ in range(self.nranks)]
        self._complete = [0] * len(self._parts)  # by how many trainers each bucket is delivered
        self._committed: dict[int, float] = {}

    def _check(self, rank: int, epoch: int, step: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"rank {rank} sent a message of epoch {epoch}, this is epoch {self.epoch}")
        if step != self.step:
            raise ProtocolError(f"rank {rank} sent step {step}, this is step {self.step}")
        if rank in self._committed:
            raise ProtocolError(f"rank {rank} sent more after committing step {step}")
