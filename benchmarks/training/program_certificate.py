"""The certificate of a program of the user's own: ours are equal bit for bit, Paddle's within a bound."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contestants.table_of_trainings import OTHER_ORDER, PADDLE_SCHEMES, Contestant
from benchmarks.records.script import Certificate, ProgramRecord, Yardstick
from common.errors import CertificateFailed, GradSyncError
from common.system.mkl import CPU_TYPE, wanted_cpu_type

__all__ = ["PADDLE_BOUNDS", "YARDSTICK_MULTIPLE", "certify_programs", "distance", "ours_that_disagree"]

PADDLE_BOUNDS = {1: 1e-7, 5: 1e-4, 20: 1e-2}
"""After so many backwards (or all, if there are fewer), the largest accepted distance of the parameters from those
under paddle.DataParallel, relative to their size (L2 norms).

With two ranks there is none: a + b = b + a, and halving is exact. With more, Gloo adds in another order, and training
amplifies the difference. For the MNIST example on 4 ranks it is 1e-8 after one step, 4e-8 after 5, 6e-8 after 12, 3e-4
after 20, 5e-3 after 40: Adam divides each gradient by its own size, so one that is little more than rounding moves its
parameter by up to the learning rate, here 0.01, either way. Later the two are two equally good trainings.

How fast rounding grows is the program's own affair. So where a bound is exceeded by more than two ranks, the program
runs once more on a ring that sums in another order, as good as its own (benchmarks/training/other_order.py), and
Paddle may be YARDSTICK_MULTIPLE times as far away as that one is. For the ResNet-18 example on 4 ranks, batch 8:

    backwards                    1      2      3      5      10     20
    Paddle                       2e-9   2e-5   4e-4   5e-3   3e-2   7e-2
    another order                2e-9   1e-5   4e-4   4e-3   3e-2   7e-2
    a bucket without one rank    6e-4   1e-3   3e-3   1e-2
    a bucket 0.1 % too large     1e-6   2e-5   6e-4   5e-3

So it is the first backward that tells a wrong mean from rounding."""

YARDSTICK_MULTIPLE = 10


Records = Mapping[Contestant, Sequence[ProgramRecord]]
Failures = Mapping[Contestant, GradSyncError]
Distances = dict[int, float]  # after so many backwards


def ours_that_disagree(failures: Failures) -> dict[str, GradSyncError]:
    """Contestants of ours whose own ranks ended with different parameters."""
    wrong = {c: exc for c, exc in failures.items() if isinstance(exc, CertificateFailed)}
    return {c.name: exc for c, exc in wrong.items() if c.scheme not in PADDLE_SCHEMES}


def certify_programs(
    contestants: Sequence[Contestant],
    runs: Records,
    failures: Failures,
    folder: Path,
    once_more: Callable[[Contestant], bool],
) -> Certificate:
    """Ours must be equal bit for bit, on every rank and in every repetition; Paddle's within the bound.

    Args:
        once_more: runs the program under one of ours that is not measured, and says whether it ran: with MKL's own
            choice of kernels, to hold paddle-default against where ours are others, or in another order, by which more
            than two ranks beyond a fixed bound are judged.
    """
    schemes = {c.name: runs[c][0].parameters_sha256 for c in contestants}
    identical = True
    against_paddle: dict[str, Distances] = {}
    yardsticks: dict[str, dict[int, Yardstick]] = {}
    own_kernels: list[str] = []
    close = True
    for nranks in sorted({c.nranks for c in contestants}):
        ours = [c for c in contestants if c.nranks == nranks and c.scheme not in PADDLE_SCHEMES]
        identical &= len({r.parameters_sha256 for c in ours for r in runs[c]}) <= 1
        for rival in (c for c in contestants if c.nranks == nranks and c.scheme in PADDLE_SCHEMES):
            for contestant in ours[:1]:
                alike = contestant
                if rival.scheme == "paddle-default" and wanted_cpu_type() != os.environ.get(CPU_TYPE):
                    alike = replace(contestant, mkl_chooses=True)
                    if not once_more(alike):
                        continue  # that failure is told
                    own_kernels.append(rival.name)
                found = against_paddle[rival.name] = distances_between(alike, rival, folder)
                bounds = PADDLE_BOUNDS
                other = Contestant(OTHER_ORDER, "shm", nranks)  # with our kernels for paddle-default too: a scale
                if nranks > 2 and not within(found, bounds) and once_more(other):
                    yardstick = distances_between(contestant, other, folder)
                    bounds = bounds_by(yardstick)
                    yardsticks[rival.name] = {n: Yardstick(d, bounds[n]) for n, d in yardstick.items()}
                close &= within(found, bounds)
    identical &= not ours_that_disagree(failures)
    return Certificate(
        identical=identical,
        ours=[c.name for c in contestants if c.scheme not in PADDLE_SCHEMES],
        against_paddle=against_paddle,
        bounds=PADDLE_BOUNDS,
        yardsticks=yardsticks,
        own_kernels=own_kernels,
        passed=identical and close,
        schemes=schemes,
    )


def bounds_by(yardstick: Distances) -> Distances:
    """The fixed ones, or a multiple of what rounding does, if that is more."""
    return {steps: max(bound, YARDSTICK_MULTIPLE * yardstick[steps]) for steps, bound in PADDLE_BOUNDS.items()}


def within(found: Distances, bounds: Distances) -> bool:
    return all(apart <= bounds[steps] for steps, apart in found.items())


def distances_between(one: Contestant, other: Contestant, folder: Path) -> Distances:
    return {
        steps: distance(parameters(folder, one, steps), parameters(folder, other, steps)) for steps in PADDLE_BOUNDS
    }


def parameters(folder: Path, contestant: Contestant, steps: int) -> dict[str, Any]:
    name = contestant.stem
    with np.load(folder / f"{name}.{steps}.npz", allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


def distance(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    apart = sum(float(np.square(mine[name].astype(float) - theirs[name]).sum()) for name in theirs)
    size = sum(float(np.square(theirs[name].astype(float)).sum()) for name in theirs)
    return float(np.sqrt(apart / size)) if size else 0.0
