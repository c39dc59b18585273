"""The one order of summation that makes all schemes compute the same bits.

Chunk c of a bucket is summed starting at rank c+1 (mod N), then c+2, ..., ending at c, in the arrays' own type
(float16: in float32, rounded once at the end), and then multiplied by 1/N in that type. A ring does this by the
way it travels (collective/algorithms/schedule.py); a parameter server and the ranks of one host do it by reduction.py.
Arrival order never matters.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.tensors.buckets import chunk_bounds

__all__ = ["canonical_ranks", "chunk_with", "runs_of_chunks"]


def canonical_ranks(chunk: int, nranks: int) -> tuple[int, ...]:
    """The ranks in the order in which chunk `chunk` is summed.

    >>> canonical_ranks(1, 4)
    (2, 3, 0, 1)
    """
    return tuple((chunk + 1 + i) % nranks for i in range(nranks))


def chunk_with(rank: int, place: int, nranks: int) -> int:
    """The chunk in whose order `rank` comes at `place`, counted from 0.

    >>> chunk_with(3, 1, 4)
    1
    """
    return (rank - 1 - place) % nranks


def runs_of_chunks(
    bucket_start: int, bucket_length: int, nranks: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(ranks in the order of summation, first, last) of what lies of each chunk in start..stop."""
    for chunk, (a, b) in enumerate(chunk_bounds(bucket_length, nranks)):
        first, last = max(bucket_start + a, start), min(bucket_start + b, stop)
        if first < last:
            yield canonical_ranks(chunk, nranks), first, last
