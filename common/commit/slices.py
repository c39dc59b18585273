"""State of the built-in trainer's optimizer, in slices of the arena, cut anew for another number of servers.

An optimizer keeps an array for every word of the parameters (a moment), or one number for all (a power of beta). What
ranks and servers keep of it are slices; together they are the arena's, whoever kept which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Slice", "arrays_of", "cut", "slices_in"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Slice:
    """Of words start..stop of the arena; `arrays` has for every kind of state stop - start values, or one."""

    start: int
    stop: int
    arrays: Mapping[str, Array]


def arrays_of(slices: Iterable[Slice]) -> dict[str, Array]:
    """What a part is to keep of slices, under names that `slices_in` reads: `START-STOP.KIND`."""
    return {f"{s.start}-{s.stop}.{kind}": array for s in slices for kind, array in s.arrays.items()}


def slices_in(arrays: Mapping[str, Array]) -> list[Slice]:
    """The slices that `arrays_of` named so."""
    found: dict[tuple[int, int], dict[str, Array]] = {}
    for name, array in arrays.items():
        place, _, kind = name.partition(".")
        start, _, stop = place.partition("-")
        found.setdefault((int(start), int(stop)), {})[kind] = array
    return [Slice(*place, kinds) for place, kinds in found.items()]


def cut(slices: Sequence[Slice], start: int, stop: int) -> Slice:
    """Words start..stop of what the slices make up; without any, the slice has no state.

    Raises:
        ValueError: they leave a gap, or do not have the same kinds.
    """
    there = [s for s in sorted(slices, key=lambda s: s.start) if s.start < stop and s.stop > start]
    kinds = list(there[0].arrays) if there else []
    at = start
    for each in there:
        if each.start > at or set(each.arrays) != set(kinds):
            raise ValueError(f"words {at}..{max(at, each.start)} are missing")
        at = each.stop
    if there and at < stop:
        raise ValueError(f"words {at}..{stop} are missing")
    return Slice(start, stop, {kind: _joined([_within(s, kind, start, stop) for s in there]) for kind in kinds})


def _within(each: Slice, kind: str, start: int, stop: int) -> Array:
    array = each.arrays[kind]
    if array.size == 1 and each.stop - each.start != 1:
        return array
    return array[max(start, each.start) - each.start : min(stop, each.stop) - each.start]


def _joined(runs: Sequence[Array]) -> Array:
    """One array; of numbers, which are the same for all words, the first."""
    return runs[0] if all(run.size == 1 for run in runs) else np.concatenate(runs)
