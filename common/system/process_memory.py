"""How much memory a process needs, as the kernel accounts for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from common.system.memory import segment_name

__all__ = ["ProcessMemory", "added_since", "leave_memory", "memory_of", "pss_bytes"]


@dataclass(frozen=True)
class ProcessMemory:
    """In bytes.

    Args:
        pss: proportional set size: what n processes map counts 1/n in each, whoever has made it.
        own: what is private to it and the segments that it has created, wholly, whoever maps them too; neither other
            processes' segments nor files, such as libraries.
    """

    pss: int
    own: int


def memory_of(pid: int) -> ProcessMemory:
    """What the process uses now. Not quick: the kernel walks through all of its pages.

    Raises:
        OSError: it has ended, or is another user's.
    """
    pss = own = 0
    for name, sizes in mappings(Path(f"/proc/{pid}/smaps")):
        pss += sizes["Pss"]
        own += sizes["Rss"] if name.startswith(f"/memfd:{segment_name(pid)} ") else sizes["Anonymous"]
    if not pss:
        raise ProcessLookupError(f"process {pid} has ended, and uses no memory")
    return ProcessMemory(pss, own)


def pss_bytes() -> int:
    """This process's proportional set size, in less time."""
    return sum(sizes["Pss"] for _, sizes in mappings(Path("/proc/self/smaps_rollup")))


def mappings(file: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """(what is mapped, its sizes in bytes by their names in proc(5)); one, of them all, in a rollup."""
    name, sizes = "", dict[str, int]()
    for line in file.read_text().splitlines():
        key, _, rest = line.partition(":")
        if " " in key:  # of a mapping's first line: address range, access, ...
            if sizes:
                yield name, sizes
            name, sizes = " ".join(line.split()[5:]), {}
        elif rest.endswith(" kB"):
            sizes[key] = int(rest.split()[0]) * 1024
    if sizes:
        yield name, sizes


def leave_memory(file: Path) -> None:
    """Write down what this process uses now, having imported all that it will, for `added_since`."""
    file.write_text(json.dumps({"pid": os.getpid(), **asdict(memory_of(os.getpid()))}) + "\n")


def added_since(file: Path) -> ProcessMemory:
    """What the process that has left this file uses more than it did then.

    Raises:
        OSError: it has not left it, or it has ended.
    """
    before = json.loads(file.read_text())
    now = memory_of(before["pid"])
    return ProcessMemory(now.pss - before["pss"], now.own - before["own"])
