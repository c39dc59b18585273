"""The ring's schedule: which chunk a rank sends and receives at each step, as pure functions of integers.

With N = 4, the chunk that each rank sends at each step (it receives the one before, modulo N):

    reduce-scatter          all-gather
    step   0  1  2          0  1  2
    rank 0 3  2  1          0  3  2
    rank 1 0  3  2          1  0  3
    rank 2 1  0  3          2  1  0
    rank 3 2  1  0          3  2  1

In reduce-scatter chunk c starts at rank c+1 and ends, complete, at rank c: the canonical order of summation
(common/reduction.py). Each phase takes N-1 steps and moves (N-1)/N of the data through every link.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["all_gather_steps", "reduce_scatter_steps"]


def reduce_scatter_steps(rank: int, nranks: int) -> Iterator[tuple[int, int]]:
    """(chunk to send on, chunk to receive and add to one's own) for each step.

    >>> list(reduce_scatter_steps(0, 4))
    [(3, 2), (2, 1), (1, 0)]
    """
    for step in range(nranks - 1):
        yield (rank - 1 - step) % nranks, (rank - 2 - step) % nranks


def all_gather_steps(rank: int, nranks: int) -> Iterator[tuple[int, int]]:
    """(complete chunk to send on, complete chunk to receive) for each step.

    >>> list(all_gather_steps(0, 4))
    [(0, 3), (3, 2), (2, 1)]
    """
    for step in range(nranks - 1):
        yield (rank - step) % nranks, (rank - 1 - step) % nranks
