"""A rank of a case: averages NumPy arrays step by step, and writes what becomes of it, a line at a time.

python -m benchmarks.faults.worker ring|ps RANK NRANKS PLACE BACKEND TIMEOUT WAIT_LIMIT STEPS

ready               it joins the others when its standard input ends
step N              it has made so many
digest SHA256       of its parameters, at the end
failed KIND AT: WORDS   AT: seconds of the clock that all processes of a machine share
ended by WORDS      it has left, or never came so far
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

import collective
import ps
from common.errors import GradSyncError
from common.system.process import prepare_process
from common.tensors.arena import FloatArray

__all__ = ["main"]

WORDS = 20_000
RATE = np.float32(0.125)
PACE_S = 0.01  # a step; so that a fault has a step to fall into


@contextmanager
def averaging(
    scheme: str, rank: int, nranks: int, place: str, backend: str, timeout: float, wait_limit: float
) -> Iterator[tuple[FloatArray, Callable[[], object]]]:
    """An array, and what replaces it by its mean over ranks."""
    if scheme == "ring":
        with collective.connect(rank, nranks, place, backend, timeout=timeout, wait_limit=wait_limit) as group:
            array = group.empty(WORDS)
            yield array, lambda: group.all_reduce(array, "mean")
    else:
        with ps.connect(place, rank, nranks, backend, timeout=timeout) as connection:
            array = connection.empty(WORDS)
            connection.register(connection.empty(WORDS), None)
            yield array, lambda: connection.push_pull(array)


def train(rank: int, steps: int, array: FloatArray, average: Callable[[], object], parameters: FloatArray) -> None:
    for step in range(steps):
        array[...] = np.random.default_rng([rank, step]).standard_normal(WORDS, np.float32)
        array += parameters
        average()
        parameters -= RATE * array
        print(f"step {step + 1}", flush=True)
        time.sleep(PACE_S)


def main(arguments: list[str]) -> int:
    scheme, rank, nranks, place, backend, timeout, wait_limit, steps = arguments
    prepare_process()
    print("ready", flush=True)
    sys.stdin.read()
    parameters = np.zeros(WORDS, np.float32)
    try:
        limits = float(timeout), float(wait_limit)
        with averaging(scheme, int(rank), int(nranks), place, backend, *limits) as (array, average):
            try:
                train(int(rank), int(steps), array, average, parameters)
            except GradSyncError as exc:  # before it takes leave
                print(f"failed {type(exc).__name__} {time.monotonic():.3f}: {exc}", flush=True)
                raise
    except GradSyncError as exc:
        print(f"ended by {exc}", flush=True)
        return exc.exit_code
    print(f"digest {hashlib.sha256(parameters.tobytes()).hexdigest()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
