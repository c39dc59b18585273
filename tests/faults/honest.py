"""`python -m tests.faults.honest SCHEME RANK ADDRESS FILE`: one of two members does again and again what a crowd might
hold up: under `ps` a step, under `collective`, which has ports only while its ranks meet, a meeting.

Ends when FILE is there, which rank 0 tells the other; prints [[begin, seconds], ...] of what it did, monotonic.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import collective
import ps
from common.system.process import prepare_process

__all__: list[str] = []

WORDS = 1 << 18


def steps(rank: int, address: str, over: Path) -> list[tuple[float, float]]:
    done: list[tuple[float, float]] = []
    with ps.connect([address], rank, 2, "tcp") as client:
        parameters, gradients = client.empty(WORDS), client.empty(WORDS)
        client.register(parameters)
        print("ready", flush=True)
        while True:
            begin = time.monotonic()
            gradients[...] = float(rank == 0 and over.exists())
            client.push_pull(gradients)
            done.append((begin, time.monotonic() - begin))
            if gradients[0]:
                return done


def meetings(rank: int, address: str, over: Path) -> list[tuple[float, float]]:
    done: list[tuple[float, float]] = []
    print("ready", flush=True)
    while True:
        begin = time.monotonic()
        with collective.connect(rank, 2, address, backend="tcp", timeout=20) as group:
            done.append((begin, time.monotonic() - begin))
            last = np.full(1, float(rank == 0 and over.exists()), np.float32)
            group.all_reduce(last)
        if last[0]:
            return done


def main(scheme: str, rank: int, address: str, over: Path) -> None:
    prepare_process()
    print(json.dumps({"ps": steps, "collective": meetings}[scheme](rank, address, over)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
