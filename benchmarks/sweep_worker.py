"""`python -m benchmarks.sweep_worker BACKEND NRANKS ADDRESS CONTROL [RANK]`: one rank of a group that is measured.

Takes jobs over an abstract socket, a line of JSON each: {"count": elements, "iterations": k}; answers with the seconds
of each iteration and the number of elements that a first, checked call got wrong. Between jobs it sleeps.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import numpy as np

from common.process import prepare_process

__all__ = ["main"]

WARMUP = 2  # calls before those that are timed


def main() -> int:
    prepare_process()
    name, nranks, address, control, *rest = sys.argv[1:]
    rank = int(rest[0] if rest else os.environ["OMPI_COMM_WORLD_RANK"])
    from benchmarks.peers import load_peer

    module = load_peer(name)
    peer = module.Rank(name, rank, int(nranks), address)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{control}")
        lines = connection.makefile("rw", buffering=1)
        lines.write(json.dumps({"rank": rank}) + "\n")
        for line in lines:
            job = json.loads(line)
            lines.write(json.dumps(measure(peer, job, rank, int(nranks), checked=getattr(module, "sums", True))) + "\n")
    peer.close()
    return 0


def measure(peer: Any, job: dict[str, int], rank: int, nranks: int, *, checked: bool) -> dict[str, Any]:
    if getattr(peer, "array", None) is None or peer.array.size != job["count"]:
        peer.resize(job["count"])
    wrong = wrong_elements(peer, rank, nranks) if checked else 0
    peer.array[...] = 0  # a sum that never grows
    for _ in range(WARMUP):
        peer.all_reduce()
    seconds = []
    for _ in range(job["iterations"]):
        begun = time.perf_counter()
        peer.all_reduce()
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds, "wrong": wrong}


def wrong_elements(peer: Any, rank: int, nranks: int) -> int:
    """Sum small whole numbers, which are exact in any order."""
    xp: Any = getattr(peer, "xp", np)
    pattern = xp.arange(peer.array.size, dtype=np.float32) % 61
    peer.array[...] = pattern + rank
    peer.all_reduce()
    return int(xp.count_nonzero(peer.array != pattern * nranks + nranks * (nranks - 1) // 2))


if __name__ == "__main__":
    sys.exit(main())
