"""How the flat buffers are cut: buckets, chunks and pieces, as pure functions of integers.

arena    |<- parameter 0 ->|<- parameter 1 ->| ... |<- last parameter ->|      padded to 16 elements each
buckets  |<------- bucket 2 ------->|<---- bucket 1 ---->|<- bucket 0 ->|      backward's order: last first
chunks   |   0   |   1   |   2   |3 |                                          N parts of a bucket, one a rank
pieces   | | | | |                                                             what travels at a time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

__all__ = [
    "ALIGNMENT",
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "Bucket",
    "align",
    "chunk_bounds",
    "pieces_of",
    "plan_buckets",
    "words",
]

ALIGNMENT = 16  # words of 4 bytes: a cache line; optimizer slices may be cut here (bitwise safe)
BUCKET_BYTES = 25_000_000
FIRST_BUCKET_BYTES = 1_000_000  # small, so that communication starts early in backward


@dataclass(frozen=True)
class Bucket:
    """Words `start`..`stop` of the arena, synchronised as one; all of one dtype."""

    start: int
    stop: int
    dtype: str = "float32"

    @property
    def length(self) -> int:
        return self.stop - self.start


def words(dtype: str) -> int:
    """How many words of 4 bytes an element takes: 1 for float32, 2 for float64."""
    return {"float32": 1, "float64": 2}[dtype]


def align(count: int) -> int:
    """`count` rounded up to a multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def plan_buckets(
    starts: Sequence[int],
    length: int,
    *,
    first_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: str = "float32",
) -> tuple[Bucket, ...]:
    """Group whole parameters into buckets from the arena's end, where backward begins, to its start.

    Args:
        starts: first word of every parameter, ascending.
        length: where the last one ends.
        first_bytes, bucket_bytes: a bucket is closed when the next parameter would make it larger than this;
            a parameter larger than the limit has a bucket of its own.
        dtype: of all these parameters.

    >>> plan_buckets([0, 16, 48], 64, first_bytes=64, bucket_bytes=256)
    (Bucket(start=48, stop=64, dtype='float32'), Bucket(start=0, stop=48, dtype='float32'))
    """
    buckets: list[Bucket] = []
    stop = begin = length
    for start in reversed(starts):
        limit = bucket_bytes if buckets else first_bytes
        if begin < stop and (stop - start) * 4 > limit:
            buckets.append(Bucket(begin, stop, dtype))
            stop = begin
        begin = start
    if begin < stop:
        buckets.append(Bucket(begin, stop, dtype))
    return tuple(buckets)


@lru_cache(1024)
def chunk_bounds(length: int, nranks: int) -> tuple[tuple[int, int], ...]:
    """Cut `length` elements into `nranks` chunks as equal as cuts at ALIGNMENT allow; late ones may be empty.

    >>> chunk_bounds(100, 3)
    ((0, 48), (48, 80), (80, 100))
    """
    units = -(-length // ALIGNMENT)
    cuts = [min(length, -(-units * c // nranks) * ALIGNMENT) for c in range(nranks + 1)]
    return tuple(pairwise(cuts))


def pieces_of(start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut start..stop into runs of at most `limit` elements; nothing if it is empty."""
    for begin in range(start, stop, limit):
        yield begin, min(begin + limit, stop)
