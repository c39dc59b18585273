"""How the flat buffers are cut: buckets, chunks and segments, as pure functions of integers.

arena    |<- parameter 0 ->|<- parameter 1 ->| ... |<- last parameter ->|      padded to 16 elements each
buckets  |<------- bucket 2 ------->|<---- bucket 1 ---->|<- bucket 0 ->|      backward's order: last first
chunks   |   0   |   1   |   2   |3 |                                          N parts of a bucket, one a rank
segments | | | | |                                                             what travels at a time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = [
    "ALIGNMENT",
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "Bucket",
    "align",
    "chunk_bounds",
    "plan_buckets",
    "segments",
]

ALIGNMENT = 16  # float32 elements: 64 bytes, a cache line; optimizer slices may be cut here (bitwise safe)
BUCKET_BYTES = 25_000_000
FIRST_BUCKET_BYTES = 1_000_000  # small, so that communication starts early in backward


@dataclass(frozen=True)
class Bucket:
    """Elements `start`..`stop` of the arena, synchronised as one."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def align(count: int) -> int:
    """`count` rounded up to a multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def plan_buckets(
    starts: Sequence[int],
    length: int,
    *,
    first_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    itemsize: int = 4,
) -> tuple[Bucket, ...]:
    """Group whole parameters into buckets from the arena's end, where backward begins, to its start.

    Args:
        starts: first element of every parameter, ascending, the first being 0.
        length: of the arena, in elements.
        first_bytes, bucket_bytes: a bucket is closed when the next parameter would make it larger than this;
            a parameter larger than the limit has a bucket of its own.

    >>> plan_buckets([0, 16, 48], 64, first_bytes=64, bucket_bytes=256)
    (Bucket(start=48, stop=64), Bucket(start=0, stop=48))
    """
    buckets: list[Bucket] = []
    stop = begin = length
    for start in reversed(starts):
        limit = bucket_bytes if buckets else first_bytes
        if begin < stop and (stop - start) * itemsize > limit:
            buckets.append(Bucket(begin, stop))
            stop = begin
        begin = start
    if begin < stop:
        buckets.append(Bucket(begin, stop))
    return tuple(buckets)


def chunk_bounds(length: int, nranks: int) -> tuple[tuple[int, int], ...]:
    """Cut `length` elements into `nranks` chunks as equal as cuts at ALIGNMENT allow; late ones may be empty.

    >>> chunk_bounds(100, 3)
    ((0, 48), (48, 80), (80, 100))
    """
    units = -(-length // ALIGNMENT)
    cuts = [min(length, -(-units * c // nranks) * ALIGNMENT) for c in range(nranks + 1)]
    return tuple(pairwise(cuts))


def segments(start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut start..stop into runs of at most `limit` elements; nothing if it is empty."""
    for begin in range(start, stop, limit):
        yield begin, min(begin + limit, stop)
