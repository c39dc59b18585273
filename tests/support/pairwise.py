"""Combinations of parameters: a few that show every two values together. `make test-long` adds half of the others, in
which any values of all parameters but one meet, with GRADSYNC_LONG_TESTS=all the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

from tests.support.thorough import ALL, and_long

__all__ = ["combined"]

Row = tuple[int, ...]
Pair = tuple[int, int, int, int]


def combined(names: str, *parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by combinations of these parameters, one sequence of values for each name."""
    counts = tuple(map(len, parameters))

    def values(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
        return [tuple(each[i] for each, i in zip(parameters, row, strict=True)) for row in rows]

    rows = product(*map(range, counts))
    chosen = and_long(values(pairwise(*counts)), values(row for row in rows if ALL or sum(row) % 2 == 0))
    return pytest.mark.parametrize(names, chosen, ids=["-".join(map(str, getattr(c, "values", c))) for c in chosen])


@cache
def pairwise(*counts: int) -> list[Row]:
    """Few rows of indices below `counts`, in which every two indices of two parameters meet at least once.

    Rows are taken greedily: always the one with the most pairs that no row before it has. The same rows every time.
    """
    rows = list(product(*map(range, counts)))
    missing = {pair for row in rows for pair in pairs_of(row)}
    taken = []
    while missing:
        best = max(rows, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(best)
        taken.append(best)
    return sorted(taken)


@cache
def pairs_of(row: Row) -> frozenset[Pair]:
    return frozenset((a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2))
