"""`python -m benchmarks.operations.worker OPERATION BACKEND NRANKS ADDRESS CONTROL [RANK]`: one rank that is measured.

Takes jobs over the Unix socket CONTROL, a line of JSON each: {"count": elements, "iterations": k, "warmup": calls
before those, "check": whether a first call is checked}; answers with the seconds of each iteration and the number of
elements that the checked call got wrong. {"count": elements, "late": seconds}: the last rank comes that much later
than the others, who answer with the share of a core that each used while it waited. {"rest": true}: memory is given up.
Between jobs it sleeps.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import numpy as np

from common.system.memory import trim_malloc
from common.system.process import prepare_process
from common.tensors.buckets import pieces_of

__all__ = ["main"]

BLOCK = 1 << 16  # elements that a check looks at at a time


def main() -> int:
    prepare_process()
    operation, name, nranks, address, control, *rest = sys.argv[1:]
    rank = int(rest[0] if rest else os.environ["OMPI_COMM_WORLD_RANK"])
    from benchmarks.contestants import load_peer

    module = load_peer(name)
    checked = getattr(module, "sums", True) and not (rank and getattr(module, "driven_by_rank_0", False))
    peer = module.Rank(name, rank, int(nranks), address)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(control)
        lines = connection.makefile("rw", buffering=1)
        lines.write(json.dumps({"rank": rank}) + "\n")
        for line in lines:
            job = json.loads(line)
            if "rest" in job:
                found = be_at_rest(peer)
            elif "late" in job:
                found = wait(peer, operation, job, late=rank == int(nranks) - 1)
            else:
                found = measure(peer, operation, job, rank, int(nranks), checked=checked and job["check"])
            lines.write(json.dumps(found) + "\n")
    peer.close()
    return 0


def measure(peer: Any, operation: str, job: dict[str, Any], rank: int, nranks: int, *, checked: bool) -> dict[str, Any]:
    resize(peer, job["count"])
    run = getattr(peer, operation)
    wrong = CHECKS[operation](peer, rank, nranks) if checked else 0
    peer.array[...] = 0  # a sum that never grows
    for _ in range(job["warmup"]):
        run()
    seconds = []
    for _ in range(job["iterations"]):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds, "wrong": wrong}


def wait(peer: Any, operation: str, job: dict[str, Any], *, late: bool) -> dict[str, Any]:
    """Of all threads of this process; what another one does for it is not counted."""
    resize(peer, job["count"])
    run = getattr(peer, operation)
    peer.array[...] = 0
    run()
    if late:
        time.sleep(job["late"])  # what is measured, not a way to synchronise
    begun, used = time.perf_counter(), time.process_time()
    run()
    used, seconds = time.process_time() - used, time.perf_counter() - begun
    return {"core": None if late else used / seconds}


def be_at_rest(peer: Any) -> dict[str, Any]:
    """Keep one element; the next job asks for more."""
    peer.resize(1)
    trim_malloc()
    return {}


def resize(peer: Any, count: int) -> None:
    if getattr(peer, "array", None) is None or peer.array.size != count:
        peer.resize(count)


def wrong_sums(peer: Any, rank: int, nranks: int) -> int:
    """Sum small whole numbers, which are exact in any order."""
    xp: Any = getattr(peer, "xp", np)
    pattern = xp.arange(peer.array.size, dtype=np.float32) % 61
    peer.array[...] = pattern + rank
    peer.all_reduce()
    return int(xp.count_nonzero(peer.array != pattern * nranks + nranks * (nranks - 1) // 2))


def wrong_copies(peer: Any, rank: int, nranks: int) -> int:  # noqa: ARG001 - as the others
    """Rank 0's whole numbers; the others begin with different ones."""
    xp: Any = getattr(peer, "xp", np)
    pattern = xp.arange(peer.array.size, dtype=np.float32) % 61
    peer.array[...] = pattern + rank
    peer.broadcast()
    return int(xp.count_nonzero(peer.array != pattern))


def wrong_parameters(peer: Any, rank: int, nranks: int) -> int:
    """A step of SGD with whole numbers, whose mean is exact for nranks that are powers of two, else nearly so. Block by
    block, for malloc keeps what is freed, and a rank's memory is measured too."""
    from benchmarks.contestants import RATE

    adds_ranks, wrong = hasattr(peer, "changed"), 0
    blocks = [(slice(a, b), (np.arange(a, b) % 61).astype(np.uint8)) for a, b in pieces_of(0, peer.array.size, BLOCK)]
    before = peer.parameters.copy()
    for run, pattern in blocks:
        peer.array[run] = pattern + np.float32(0 if adds_ranks else rank)
    if adds_ranks:
        peer.changed()
    peer.push_pull()
    for run, pattern in blocks:
        expected = before[run] - np.float32(RATE) * (pattern + np.float32((nranks - 1) / 2))
        wrong += int(np.count_nonzero(np.abs(peer.parameters[run] - expected) > 1e-5 * np.abs(expected) + 1e-6))
    if adds_ranks:
        peer.array[...] = 0
        peer.changed()
    return wrong


CHECKS = {"all_reduce": wrong_sums, "push_pull": wrong_parameters, "broadcast": wrong_copies}


if __name__ == "__main__":
    sys.exit(main())
