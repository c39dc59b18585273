"""One large group of processes: started, let in, looked at, and one of its ranks killed."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

from benchmarks.faults.running import Process
from benchmarks.records.scale import GroupScale
from common.credentials.credentials import TOKEN_VARIABLE, environment_of, find
from common.credentials.token import new_token
from common.errors import GradSyncError
from common.launch.ranks import abstract_address

__all__ = ["measure"]

IMPORTS_S = 1.5  # for each rank, at most: all of them import on few cores
JOIN_S, NAME_S = 120.0, 60.0
SETTLE_S = 3.0  # gRPC's threads end after the meeting
POLL_S = 0.25  # ranks themselves say when; looking takes of the cores they share


def measure(nranks: int, backend: str) -> GroupScale:
    """Of a group over shm or tcp.

    Raises:
        GradSyncError: it did not come together, or a rank did not end when another was killed.
    """
    environment = {**os.environ, **environment_of(find(environment={TOKEN_VARIABLE: new_token()}))}
    place = abstract_address("scale")
    ranks: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="gradsync-scale-") as name:
        folder, gate = Path(name), Path(name) / "gate"
        os.mkfifo(gate)
        try:
            for rank in range(nranks):
                words = [gate, rank, nranks, place, backend, JOIN_S, nranks // 2]
                command = [sys.executable, "-m", "benchmarks.scale.worker", *map(str, words)]
                ranks.append(Process(f"rank {rank}", folder / str(rank), command, environment))
            until_all(ranks, "imported", 10 + IMPORTS_S * nranks)
            return of_group(ranks, gate, backend)
        finally:
            for each in ranks:
                each.end()


def of_group(ranks: Sequence[Process], gate: Path, backend: str) -> GroupScale:
    """Whose ranks have imported."""
    begin = time.monotonic()
    with gate.open("wb"):
        pass
    complete = [float(line.split()[1]) - begin for line in until_all(ranks, "complete", JOIN_S)]
    until_all(ranks, "step 1", NAME_S)
    time.sleep(SETTLE_S)
    held = [holding(each.pid) for each in ranks]
    killed = len(ranks) // 2  # for which all others wait
    began = time.monotonic()
    ranks[killed].send(signal.SIGKILL)
    others = [each for rank, each in enumerate(ranks) if rank != killed]
    told = [failure_in(line) for line in until_all(others, "failed", NAME_S)]
    named = [at - began for at, words in told if re.match(rf"rank {killed}\b", words)]
    return GroupScale(
        nranks=len(ranks),
        backend=backend,
        complete_s=round(max(complete), 2),
        sockets=[int(median(row[0] for row in held[1:])), max(row[0] for row in held[1:]), held[0][0]],
        descriptors=[int(median(row[1] for row in held[1:])), max(row[1] for row in held[1:]), held[0][1]],
        threads=[int(median(row[2] for row in held[1:])), max(row[2] for row in held[1:]), held[0][2]],
        named=len(named),
        named_s=round(max(named, default=0.0), 2),
    )


def holding(pid: int) -> tuple[int, int, int]:
    """Sockets, descriptors and threads of a process."""
    folder = Path(f"/proc/{pid}/fd")
    links = [os.readlink(each) for each in folder.iterdir()]
    return sum(link.startswith("socket:") for link in links), len(links), psutil.Process(pid).num_threads()


def failure_in(line: str) -> tuple[float, str]:
    """When, and in which words."""
    head, _, words = line.partition(": ")
    return float(head.split()[-1]), words


def until_all(ranks: Sequence[Process], word: str, seconds: float) -> list[str]:
    """The line of each that begins so, once all have written one.

    Raises:
        GradSyncError: a rank did not, or has ended.
    """
    deadline = time.monotonic() + seconds
    found: dict[int, str] = {}
    while len(found) < len(ranks):
        for index, each in enumerate(ranks):
            if index in found:
                continue
            over = each.over
            if line := next((x for x in each.lines if x.startswith(word)), ""):
                found[index] = line
            elif over or time.monotonic() > deadline:
                what = "ended" if over else f"is not so far after {seconds:.0f} s"
                raise GradSyncError(f"{each.name} {what}: no {word!r}, its last words: {each.lines[-1:]}")
        time.sleep(POLL_S)
    return [found[index] for index in range(len(ranks))]
