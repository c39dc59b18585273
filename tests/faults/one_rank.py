"""`python -m tests.faults.one_rank RENDEZVOUS`: rank 0 of two waits for the other and tells how it ended."""

from __future__ import annotations

import resource
import sys

import numpy as np

import collective
from common.errors import GradSyncError
from common.system.process import prepare_process

__all__: list[str] = []


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(rendezvous: str) -> None:
    prepare_process()
    try:
        with collective.connect(0, 2, rendezvous, backend="tcp", algorithm="ring", timeout=20) as group:
            before = peak()
            print("ready", flush=True)
            group.all_reduce(np.zeros(1000, np.float32))
    except GradSyncError as exc:
        print(type(exc).__name__, peak() - before, exc)


if __name__ == "__main__":
    main(sys.argv[1])
