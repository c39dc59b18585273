"""What a program trained and printed, rank by rank, and whether two runs of it agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.records.programs import Outcome

Array = NDArray[np.generic]
__all__ = ["OfRank", "Recorded", "compared", "distance", "read_records"]


class OfRank(NamedTuple):
    """Of all processes that were this rank: trained parameters in the order of optimizers, and standard output."""

    parameters: list[Array]
    printed: str


Recorded = dict[int, OfRank]


def read_records(folder: Path) -> Recorded:
    """What recording/sitecustomize.py has written."""
    found: Recorded = {}
    for path in sorted(folder.glob("*.npz"), key=lambda path: [int(part) for part in path.stem.split("-")]):
        rank = int(path.stem.partition("-")[0])
        before = found.get(rank, OfRank([], ""))
        with np.load(path, allow_pickle=False) as arrays:
            parameters = [arrays[f"arr_{number}"] for number in range(len(arrays.files))]
        printed = path.with_suffix(".txt").read_text("utf-8")
        found[rank] = OfRank([*before.parameters, *parameters], before.printed + printed)
    return found


def compared(ours: Recorded, paddle: Recorded, again: Recorded) -> Outcome:
    """How a run of ours that ended well stands against Paddle's two."""
    if any(each.parameters for each in paddle.values()):
        if distance(paddle, again) != 0:
            return Outcome(how="ok")
        apart = distance(ours, paddle)
        return Outcome(how="same bits") if apart == 0 else Outcome(how="differs", distance=apart)
    printed, expected, repeated = (texts(each) for each in (ours, paddle, again))
    if expected != repeated or not any(expected):
        return Outcome(how="ok")
    return Outcome(how="same output" if printed == expected else "other output")


def texts(recorded: Recorded) -> list[str]:
    return [each.printed for _, each in sorted(recorded.items())]


def distance(one: Recorded, other: Recorded) -> float:
    """Of all parameters on all ranks, relative to the size of the second (L2 norms); 0.0 only for the same bits, and
    infinite where there are others."""
    if shapes(one) != shapes(other):
        return math.inf
    pairs = [pair for rank in one for pair in zip(one[rank].parameters, other[rank].parameters, strict=True)]
    if all(a.tobytes() == b.tobytes() for a, b in pairs):
        return 0.0
    with np.errstate(invalid="ignore"):  # of infinite ones the distance is none
        return relative(pairs)


def relative(pairs: Sequence[tuple[Array, Array]]) -> float:
    apart = sum(float(np.sum(np.square(a.astype(np.float64) - b.astype(np.float64)))) for a, b in pairs)
    size = sum(float(np.sum(np.square(b.astype(np.float64)))) for _, b in pairs)
    return math.sqrt(apart / size) if apart > 0 and size > 0 else math.inf


def shapes(recorded: Recorded) -> dict[int, list[tuple[tuple[int, ...], str]]]:
    return {rank: [(p.shape, str(p.dtype)) for p in each.parameters] for rank, each in recorded.items()}
