"""What a rank or server has alone of the training's state, kept where its death does not reach it: in memory that its
launcher holds.

The launcher makes a `memfd` for each of them, which opens it through /proc. It has no name that could be left behind,
and is gone with the last of the two. It holds the parts of two step boundaries, in slots that are written in turn:

    table    for each slot: step (-1: not whole), where, room, length
    slots    anywhere behind it

Where a process that has made nothing yet can begin again, a slot without content says so from the start.

A slot's step is taken back before the slot is written, and set once all is there; no kill comes between the bytes of an
entry, which the kernel copies at once. So a process that is killed within leaves the other slot whole; what it had
written before is there for all, for the memory is the kernel's.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.commit.parts import Buffer

__all__ = [
    "BEGINNING",
    "COPIES_VARIABLE",
    "HOLDS",
    "KEPT_VARIABLE",
    "KeptParts",
    "begins_here",
    "has_kept",
    "kept_here",
    "make_kept",
    "path_of",
]

KEPT_VARIABLE = "GRADSYNC_KEPT"  # the memory that outlives this process; unset: there is none

COPIES_VARIABLE = "GRADSYNC_COPIES"  # of how many ranks each host has; 0: there is one host (common/sync/copies.py)
HOLDS = "holds"  # how a rank notes for its launcher whose copy it has: that of rank N of another host

ENTRY = struct.Struct("<qqqq")
SLOTS = 2
AT_ONCE = 1024  # buffers that the kernel takes in one call (IOV_MAX)
TABLE_BYTES = SLOTS * ENTRY.size
NOT_WHOLE, BEGINNING = -1, -2  # in the place of a step; of the latter there is no content


def make_kept(*, begins: bool = False) -> int:
    """The descriptor of memory for one rank.

    Args:
        begins: nothing has been made yet, and it can begin again in another group.
    """
    descriptor = os.memfd_create("gradsync-kept", os.MFD_CLOEXEC)
    if begins:
        write_entry(descriptor, 0, BEGINNING, 0, 0, 0)
    return descriptor


def path_of(descriptor: int) -> str:
    """By which processes of this user open it, as long as this one lives."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def kept_here() -> KeptParts | None:
    """This process's; None: there is none, or it cannot be opened, as where /proc does not show other processes. Then
    all start anew after a failure."""
    path = os.environ.get(KEPT_VARIABLE)
    try:
        return KeptParts(path) if path else None
    except OSError:
        return None


def begins_here() -> bool:
    """Whether this process has made nothing yet, and can begin again in another group."""
    kept = kept_here()
    if kept is None:
        return False
    begins = kept.at_beginning
    kept.close()
    return begins


def has_kept(descriptor: int) -> bool:
    """Whether the parts of a step boundary are whole there, or nothing has been made yet."""
    return any(entry_of(descriptor, slot)[0] != NOT_WHOLE for slot in range(SLOTS))


class KeptParts:
    """A rank's own, or those of the process in whose place it is.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def at_beginning(self) -> bool:
        """Whether it can begin again: at most one step has been kept."""
        return any(self._entry(slot)[0] == BEGINNING for slot in range(SLOTS))

    def write(self, step: int, content: Sequence[Buffer]) -> None:
        """Keep these bytes, one after the other, instead of the older one of the two."""
        length = sum(map(len, content))
        slot = min(range(SLOTS), key=lambda slot: (self._entry(slot)[0] != NOT_WHOLE, self._entry(slot)[0]))
        _, where, room, _ = self._entry(slot)
        self._set(slot, NOT_WHOLE, where, room, 0)
        if room < length:
            where, room = max(TABLE_BYTES, os.fstat(self._descriptor).st_size), length
        write_all(self._descriptor, content, where)
        self._set(slot, step, where, room, length)

    def steps(self) -> list[int]:
        """Whose parts are whole, in order."""
        return sorted(step for step, *_ in map(self._entry, range(SLOTS)) if step >= 0)

    def read(self, step: int) -> bytes:
        """What was written with this step, one of `steps`."""
        slot = next(slot for slot in range(SLOTS) if self._entry(slot)[0] == step)
        _, where, _, length = self._entry(slot)
        content = bytearray()
        while len(content) < length:  # the kernel gives at most 2 GB at a time
            content += os.pread(self._descriptor, length - len(content), where + len(content))
        return bytes(content)

    def forget_after(self, step: int) -> None:
        """What is newer counts no longer."""
        for slot in range(SLOTS):
            kept, *place = self._entry(slot)
            if kept >= 0 and kept > step:
                self._set(slot, NOT_WHOLE, *place)

    def clear(self) -> None:
        """As if nothing had ever been written."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        os.close(self._descriptor)

    def _entry(self, slot: int) -> tuple[int, int, int, int]:
        return entry_of(self._descriptor, slot)

    def _set(self, slot: int, step: int, *place: int) -> None:
        write_entry(self._descriptor, slot, step, *place)


def write_entry(descriptor: int, slot: int, step: int, *place: int) -> None:
    write_all(descriptor, [ENTRY.pack(step + 1, *place)], slot * ENTRY.size)


def entry_of(descriptor: int, slot: int) -> tuple[int, int, int, int]:
    found = os.pread(descriptor, ENTRY.size, slot * ENTRY.size)
    made, *place = ENTRY.unpack(found.ljust(ENTRY.size, b"\0"))
    return (made - 1, *place)  # so that what was never written is not whole


def write_all(descriptor: int, content: Sequence[Buffer], where: int) -> None:
    left = deque(each for each in content if len(each))
    while left:
        written = os.pwritev(descriptor, [*itertools.islice(left, AT_ONCE)], where)
        where += written
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = memoryview(left[0])[written:]
