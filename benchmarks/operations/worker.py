"""`python -m benchmarks.operations.worker OPERATION BACKEND NRANKS ADDRESS CONTROL [RANK]`: one rank that is measured.

Takes jobs over the Unix socket CONTROL, a line of JSON each: {"count": elements, "iterations": k, "warmup": calls
before those, "check": whether a first call is checked}; answers with when what is timed began, when each iteration
ended, in seconds of the machine's clock, and the number of elements that the checked call got wrong. Ranks that never
meet say {"ready": true} before what is timed, and begin when they are told to. {"count": elements, "late": seconds}:
the last rank comes that much later than the others, who answer with the share of a core that each used while it waited.
{"rest": true}: memory is given up. Between jobs it sleeps.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
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
    from benchmarks.contestants.table_of_sweeps import load_backend

    module = load_backend(name)
    checked = getattr(module, "sums", True) and not (rank and getattr(module, "driven_by_rank_0", False))
    member = module.Rank(name, rank, int(nranks), address)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(control)
        lines = connection.makefile("rw", buffering=1)
        lines.write(json.dumps({"rank": rank}) + "\n")
        for line in lines:
            job = json.loads(line)
            if "rest" in job:
                found = be_at_rest(member)
            elif "late" in job:
                found = wait(member, operation, job, late=rank == int(nranks) - 1)
            else:
                begin = partial(begin_together, lines) if getattr(member, "apart", False) else None
                found = measure(
                    member, operation, job, rank, int(nranks), checked=checked and job["check"], begin=begin
                )
            lines.write(json.dumps(found) + "\n")
    member.close()
    return 0


def measure(
    member: Any,
    operation: str,
    job: dict[str, Any],
    rank: int,
    nranks: int,
    *,
    checked: bool,
    begin: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """
    Args:
        begin: of ranks that never meet: has them begin at the same time; None: their calls see to that.
    """
    resize(member, job["count"])
    run = getattr(member, operation)
    wrong = CHECKS[operation](member, rank, nranks) if checked else 0
    member.array[...] = 0  # a sum that never grows
    for _ in range(job["warmup"]):
        run()
    if begin:
        begin()
    times = [time.perf_counter()]
    for _ in range(job["iterations"]):
        run()
        times.append(time.perf_counter())
    return {"times": times, "wrong": wrong}


def begin_together(lines: Any) -> None:
    lines.write(json.dumps({"ready": True}) + "\n")
    lines.readline()


def wait(member: Any, operation: str, job: dict[str, Any], *, late: bool) -> dict[str, Any]:
    """Of all threads of this process; what another one does for it is not counted."""
    resize(member, job["count"])
    run = getattr(member, operation)
    member.array[...] = 0
    run()
    if late:
        time.sleep(job["late"])  # what is measured, not a way to synchronise
    begun, used = time.perf_counter(), time.process_time()
    run()
    used, seconds = time.process_time() - used, time.perf_counter() - begun
    return {"core": None if late else used / seconds}


def be_at_rest(member: Any) -> dict[str, Any]:
    """Keep one element; the next job asks for more."""
    member.resize(1)
    trim_malloc()
    return {}


def resize(member: Any, count: int) -> None:
    if getattr(member, "array", None) is None or member.array.size != count:
        member.resize(count)


def wrong_sums(member: Any, rank: int, nranks: int) -> int:
    """Sum small whole numbers, which are exact in any order."""
    xp: Any = getattr(member, "xp", np)
    pattern = xp.arange(member.array.size, dtype=np.float32) % 61
    member.array[...] = pattern + rank
    member.all_reduce()
    return int(xp.count_nonzero(member.array != pattern * nranks + nranks * (nranks - 1) // 2))


def wrong_copies(member: Any, rank: int, nranks: int) -> int:  # noqa: ARG001 - as the others
    """Rank 0's whole numbers; the others begin with different ones."""
    xp: Any = getattr(member, "xp", np)
    pattern = xp.arange(member.array.size, dtype=np.float32) % 61
    member.array[...] = pattern + rank
    member.broadcast()
    return int(xp.count_nonzero(member.array != pattern))


def wrong_parameters(member: Any, rank: int, nranks: int) -> int:
    """A step of SGD with whole numbers, whose mean is exact for nranks that are powers of two, else nearly so. Block by
    block, for malloc keeps what is freed, and a rank's memory is measured too."""
    from benchmarks.contestants.table_of_sweeps import RATE

    adds_ranks, wrong = hasattr(member, "changed"), 0
    blocks = [(slice(a, b), (np.arange(a, b) % 61).astype(np.uint8)) for a, b in pieces_of(0, member.array.size, BLOCK)]
    before = member.parameters.copy()
    for run, pattern in blocks:
        member.array[run] = pattern + np.float32(0 if adds_ranks else rank)
    if adds_ranks:
        member.changed()
    member.push_pull()
    for run, pattern in blocks:
        expected = before[run] - np.float32(RATE) * (pattern + np.float32((nranks - 1) / 2))
        wrong += int(np.count_nonzero(np.abs(member.parameters[run] - expected) > 1e-5 * np.abs(expected) + 1e-6))
    if adds_ranks:
        member.array[...] = 0
        member.changed()
    return wrong


CHECKS = {"all_reduce": wrong_sums, "push_pull": wrong_parameters, "broadcast": wrong_copies}


if __name__ == "__main__":
    sys.exit(main())
