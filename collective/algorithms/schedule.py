"""The ring's schedule: which chunk a rank sends and receives at each step, as pure functions of integers.

With N = 4, the chunk that each rank sends at each step (it receives the one before, modulo N):

    reduce-scatter          all-gather
    step   0  1  2          0  1  2
    rank 0 3  2  1          0  3  2
    rank 1 0  3  2          1  0  3
    rank 2 1  0  3          2  1  0
    rank 3 2  1  0          3  2  1

In reduce-scatter a chunk travels in the canonical order of summation (common/tensors/canonical_order.py): at step s a
rank sends on the chunk in whose order it has place s. Each phase takes N-1 steps and moves (N-1)/N of the data through
every link.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.tensors.canonical_order import chunk_with

__all__ = ["all_gather_steps", "pipeline", "reduce_scatter_steps"]


def reduce_scatter_steps(rank: int, nranks: int) -> Iterator[tuple[int, int]]:
    """(chunk to send on, chunk to receive and add to one's own) for each step.

    >>> list(reduce_scatter_steps(0, 4))
    [(3, 2), (2, 1), (1, 0)]
    """
    for step in range(nranks - 1):
        yield chunk_with(rank, step, nranks), chunk_with(rank, step + 1, nranks)


def all_gather_steps(rank: int, nranks: int) -> Iterator[tuple[int, int]]:
    """(complete chunk to send on, complete chunk to receive) for each step.

    >>> list(all_gather_steps(0, 4))
    [(0, 3), (3, 2), (2, 1)]
    """
    for step in range(nranks - 1):
        yield (rank - step) % nranks, (rank - 1 - step) % nranks


def pipeline(steps: int, pieces: int) -> Iterator[list[tuple[int, int]]]:
    """The (step, piece) pairs that are under way at each tick: a piece that has come at one step leaves at the next
    one, still in the cache. With 3 steps of 4 pieces:

        tick   0  1  2  3  4  5
        step 0 0  1  2  3
        step 1    0  1  2  3
        step 2       0  1  2  3

    >>> list(pipeline(2, 3))
    [[(0, 0)], [(0, 1), (1, 0)], [(0, 2), (1, 1)], [(1, 2)]]
    """
    for tick in range(pieces + steps - 1):
        yield [(step, tick - step) for step in range(max(0, tick - pieces + 1), min(steps, tick + 1))]
