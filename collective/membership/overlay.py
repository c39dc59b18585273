"""With whom of its group a rank keeps a connection: with all where they are few, else with some, who pass word on.

In a large group rank r is connected with r-1, r+1, r-2, r+2, r-4, r+4, ... (round the end). What each rank passes on
once to all it is connected with reaches everyone in less than log2(N) steps, also where many ranks have died:

    ranks            16    64    256   1,024   4,096
    connections      15    11     15      19      23
    most steps        1     3      4       5       6

Ranks of one host that share memory, where a group has several hosts, are connected in the same way among themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["FEW", "children", "neighbours", "within"]

FEW = 16  # ranks, of which each is connected with each


def neighbours(rank: int, nranks: int, near: Sequence[int] = (), linked: Collection[int] = ()) -> list[int]:
    """The ranks that `rank` keeps a connection with; it is in their lists, too.

    Args:
        near: those with which it shares memory, itself among them.
        linked: those with which it exchanges data.

    >>> neighbours(3, 64)
    [1, 2, 4, 5, 7, 11, 19, 35, 51, 59, 63]
    """
    found = {*within(rank, nranks), *linked}
    if near:
        found |= {near[index] for index in within(near.index(rank), len(near))}
    return sorted(found - {rank})


def within(index: int, count: int) -> set[int]:
    """The places in a circle of `count` that are connected with this one."""
    if count <= FEW:
        return {*range(count)} - {index}
    apart = [1 << i for i in range(count.bit_length()) if 1 << i < count]
    return {(index + sign * step) % count for step in apart for sign in (1, -1)}


def children(index: int, root: int, count: int) -> list[int]:
    """To whom this place passes on what begins at `root`, so that each of `count` gets it once, from a place that it is
    connected with.

    >>> children(0, 0, 20), children(1, 0, 20), children(4, 0, 20), children(12, 0, 20)
    ([1, 2, 4, 8, 16], [3, 5, 9, 17], [12], [])
    """
    if count <= FEW:
        return sorted(within(index, count)) if index == root else []
    place = (index - root) % count
    steps = [1 << i for i in range(place.bit_length(), count.bit_length()) if place + (1 << i) < count]
    return [(index + step) % count for step in steps]
