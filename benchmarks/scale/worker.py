"""A rank of a large group: joins when it is told to, averages an array, and writes what becomes of it.

python -m benchmarks.scale.worker GATE RANK NRANKS PLACE BACKEND TIMEOUT LATE

imported            it waits for somebody to open GATE, a FIFO, for writing
complete AT         AT: seconds of the clock that all processes of a machine share
step 1              it has averaged; now all but rank LATE wait for that one
failed KIND AT: WORDS
"""

from __future__ import annotations

import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import collective
from common.errors import GradSyncError
from common.system.process import die_with_parent

__all__ = ["main"]

WORDS = 1000
# What `connect` would import, one process after the other on few cores.
NEEDED = (
    "collective.group",
    "common.credentials.contexts",
    "common.credentials.issuing",
    "common.kernels.loader",
    "common.network.refusal_log",
    "common.network.rendezvous",
    "cryptography.x509",
    "grpc",
)


def main(arguments: list[str]) -> int:
    gate, rank, nranks, place, backend, timeout, late = arguments
    die_with_parent()
    for name in NEEDED:
        import_module(name)
    print("imported", flush=True)
    Path(gate).read_bytes()  # until it is closed
    try:
        with collective.connect(int(rank), int(nranks), place, backend, timeout=float(timeout)) as group:
            print(f"complete {time.monotonic():.3f}", flush=True)
            array = group.empty(WORDS)
            array.fill(group.rank)
            group.all_reduce(array, "mean")
            print("step 1", flush=True)
            while rank == late:
                signal.pause()
            try:
                group.all_reduce(array, "mean")
            except GradSyncError as exc:  # before it takes leave
                print(f"failed {type(exc).__name__} {time.monotonic():.3f}: {exc}", flush=True)
                raise
    except GradSyncError as exc:
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
