"""Which server owns which slice of the arena: a pure function of length and number of servers."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import UsageError
from common.tensors.buckets import Bucket, chunk_bounds

__all__ = ["Shard", "parse_shard", "plan_shards", "shard_of_bucket"]


@dataclass(frozen=True)
class Shard:
    """Elements `start`..`stop` of the arena; empty where there are more servers than cache lines."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def plan_shards(length: int, servers: int) -> tuple[Shard, ...]:
    """Slices of equal size, cut at multiples of 16 elements (where elementwise optimizers may be cut, bit for bit).

    >>> plan_shards(100, 2)
    (Shard(start=0, stop=64), Shard(start=64, stop=100))
    """
    return tuple(Shard(start, stop) for start, stop in chunk_bounds(length, servers))


def shard_of_bucket(shard: Shard, bucket: Bucket) -> Shard:
    """The part of a bucket that lies in a shard; empty (start = stop) if none does."""
    start = max(shard.start, bucket.start)
    return Shard(start, max(start, min(shard.stop, bucket.stop)))


def parse_shard(text: str) -> tuple[int, int]:
    """(index, count) from the I/S of `--shard`, as in 0/2.

    Raises:
        UsageError: not of that form, or I outside 0..S-1.
    """
    index, slash, count = text.partition("/")
    numbers = index.isdecimal() and count.isdecimal() and text.isascii()
    if not (slash and numbers and int(index) < int(count)):
        raise UsageError(f"--shard must be I/S with I in 0..S-1, as in 0/2 (got {text!r})")
    return int(index), int(count)
