"""Many inputs for one parser, in a process of its own, in which memory is scarce and no input may take long."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz.inputs import drawn
from tests.fuzz.target import CORPUS, Finding, Target

__all__ = ["Row", "fuzz", "keep"]

HANG_S = 10
MOST_MEMORY = 2 << 30  # that a process may map beyond what it has when it begins


@dataclass
class Row:
    """How one parser fared: what broke it, by how it did."""

    name: str
    inputs: int = 0
    seconds: float = 0.0
    findings: dict[str, bytes] = field(default_factory=dict)


def fuzz(name: str, count: int, seed: int) -> Row:
    from tests.fuzz.test_parsers import ALL

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, stop)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a peer may have lines said there
    target, row, begin = ALL[name], Row(name), time.monotonic()

    for number in range(count):
        row.inputs += 1
        try_one(target, drawn(Random(seed << 40 | number), target.seeds, target.more), row)
    row.seconds = time.monotonic() - begin
    return row


def try_one(target: Target, data: bytes, row: Row) -> None:
    signal.alarm(HANG_S)
    try:
        target.check(data)
    except Finding as exc:
        what = str(exc).partition("\n")[0][:60]
        if what not in row.findings or len(data) < len(row.findings[what]):
            row.findings[what] = data
    finally:
        signal.alarm(0)


def stop(*_: object) -> None:
    raise Finding(f"an input took more than {HANG_S} s")


def keep(name: str, data: bytes) -> Path:
    path = CORPUS / name / hashlib.sha256(data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
