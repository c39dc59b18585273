"""A rank of a large group: joins when it is told to, averages an array now and again, and writes what becomes of it.

python -m benchmarks.scale.worker GATE RANK NRANKS PLACE BACKEND TIMEOUT

imported            it waits for somebody to open GATE, a FIFO, for writing
complete AT         AT: seconds of the clock that all processes of a machine share
step 1              it has averaged
failed KIND AT: WORDS
"""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path

import collective
from common.errors import GradSyncError
from common.system.process import die_with_parent

__all__ = ["main"]

WORDS = 1000
PACE_S = 0.25  # between two averages: all share the machine's cores


def main(arguments: list[str]) -> int:
    gate, rank, nranks, place, backend, timeout = arguments
    die_with_parent()
    print("imported", flush=True)
    Path(gate).read_bytes()  # until it is closed
    try:
        with collective.connect(int(rank), int(nranks), place, backend, timeout=float(timeout)) as group:
            print(f"complete {time.monotonic():.3f}", flush=True)
            array = group.empty(WORDS)
            for step in count(1):
                array.fill(group.rank)
                group.all_reduce(array, "mean")
                if step == 1:
                    print("step 1", flush=True)
                time.sleep(PACE_S)
    except GradSyncError as exc:
        print(f"failed {type(exc).__name__} {time.monotonic():.3f}: {exc}", flush=True)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
