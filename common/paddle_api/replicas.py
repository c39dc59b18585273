"""Replicas: parameters that every rank updates for itself stay the same on all only if all do the same."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from common.sync.synchronizer import Synchronizer
from common.system.process import restarts

__all__ = ["ReplicaCheck", "replicas_agree"]

RESTARTED = "; the job was restarted: counters of the program's own begin anew then; use `step` of its TrainingState"
COMPARED = (2, 10, 100, 1000)  # soon after the start, for that shows most mistakes


class ReplicaCheck:
    """Compares, after some of the backwards, what the ranks have made of the same gradients so far."""

    def __init__(self, synchronizer: Synchronizer) -> None:
        self._synchronizer = synchronizer
        self._averagings = 0  # backwards whose mean gradients this rank updates with by itself
        self._agree = True  # the last time that they were compared

    def after_average(self, parameters: Iterable[Any]) -> None:
        """Of Paddle's parameters, which the model computes with; after every backward that averages."""
        self._averagings += 1
        if self._averagings in COMPARED and self._agree:
            when = f"in averaging backward {self._averagings:,}"
            self._agree = replicas_agree((p.numpy() for p in parameters), self._synchronizer, when)


def replicas_agree(parameters: Iterable[npt.NDArray[Any]], synchronizer: Synchronizer, when: str) -> bool:
    """Whether a digest of 64 bits is the same on all ranks; if not, rank 0 says so. All ranks call it, between steps.

    It warns and no more: a program may have its ranks differ for a while on purpose.
    """
    digest = xxh3_64()
    for array in parameters:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    mine = np.array([digest.intdigest()], np.uint64).view(np.int64)
    first, *others = synchronizer.all_gather(mine)[:, 0].tolist()
    differ = [str(rank) for rank, other in enumerate(others, 1) if other != first]
    if differ and synchronizer.rank == 0:
        again = RESTARTED if restarts() else ""
        whose = f"rank{'s' * (len(differ) > 1)} {', '.join(differ)}"
        print(
            f"gradsync: {when} the parameters of {whose} differ from rank 0's: unless that is meant, give all ranks "
            f"the same parameters, optimizer and learning rate, and hosts that round alike; or let servers "
            f"update{again}",
            file=sys.stderr,
            flush=True,
        )
    return not differ
