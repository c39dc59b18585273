"""How much memory a process needs, as the kernel accounts for it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

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
    try:
        maps = psutil.Process(pid).memory_maps(grouped=False)
    except psutil.NoSuchProcess as exc:
        raise ProcessLookupError(f"process {pid} has ended, and uses no memory") from exc
    except psutil.AccessDenied as exc:
        raise PermissionError(f"process {pid} is another user's") from exc
    mine = f"/memfd:{segment_name(pid)}"
    pss = sum(each.pss for each in maps)
    own = sum(each.rss if each.path.removesuffix(" (deleted)") == mine else each.anonymous for each in maps)
    if not pss:
        raise ProcessLookupError(f"process {pid} has ended, and uses no memory")
    return ProcessMemory(pss, own)


def pss_bytes() -> int:
    """This process's proportional set size, in less time."""
    return int(psutil.Process().memory_full_info().pss)


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
