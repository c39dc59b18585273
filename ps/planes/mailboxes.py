"""Small messages between a server and the trainers of its host, through memory that both map: two mailboxes a trainer.

A mailbox is a bounded queue with one writer and one reader:

    filled   semaphore: a note was put    (posted by the writer, waited on by the reader)
    free     semaphore: a note was taken  (the other way round; SLOTS of them at first)
    notes    SLOTS x (length, bytes)

A server listens to all its trainers with one thread: who puts a note into a mailbox to the server posts its bell
besides. Nobody waits for room: a note that finds none, or is too long, is refused, and goes another way.
"""

from __future__ import annotations

import struct

import numpy as np

from common.errors import ProtocolError
from common.system.memory import Segment
from common.system.semaphore import SEMAPHORE_BYTES, Semaphore

__all__ = ["NOTE_BYTES", "SLOTS", "Mailbox", "Mailboxes", "mailboxes_bytes"]

SLOTS = 32
LENGTH = struct.Struct("<H")
SLOT_BYTES = 512
NOTE_BYTES = SLOT_BYTES - LENGTH.size  # at most
MAILBOX_BYTES = 2 * SEMAPHORE_BYTES + SLOTS * SLOT_BYTES


class Mailbox:
    """The mailbox at byte `offset` of a segment, seen from its writer or its reader; `create`: by one process, once.

    Args:
        bell: posted with every note.
    """

    def __init__(self, segment: Segment, offset: int, *, bell: Semaphore | None = None, create: bool = False) -> None:
        self._filled = Semaphore(segment, offset, create=create)
        self._free = Semaphore(segment, offset + SEMAPHORE_BYTES, create=create)
        self._notes = segment.array(offset + 2 * SEMAPHORE_BYTES, SLOTS * SLOT_BYTES, np.uint8).data
        self._bell = bell
        self._count = 0  # of the notes that this end has put, or taken
        for _ in range(SLOTS if create else 0):
            self._free.post()

    def put(self, note: bytes) -> bool:
        """Leave a note for the reader; False if it is longer than NOTE_BYTES or there is no room. Does not block."""
        if len(note) > NOTE_BYTES or self._free.missed():
            return False
        at = self._count % SLOTS * SLOT_BYTES
        self._count += 1
        LENGTH.pack_into(self._notes, at, len(note))
        self._notes[at + LENGTH.size : at + LENGTH.size + len(note)] = note
        self._filled.post()
        if self._bell:
            self._bell.post()
        return True

    def take(self) -> bytes | None:
        """The next note; None if there is none yet. Does not block.

        Raises (as `wait`):
            ProtocolError: its length cannot be.
        """
        return None if self._filled.missed() else self._read()

    def wait(self, seconds: float) -> bytes | None:
        """The next note; None if none came within `seconds`."""
        return self._read() if self._filled.sleep(seconds) else None

    def _read(self) -> bytes:
        at = self._count % SLOTS * SLOT_BYTES
        self._count += 1
        (length,) = LENGTH.unpack_from(self._notes, at)
        if length > NOTE_BYTES:
            raise ProtocolError(f"a note in shared memory says that it has {length:,} bytes, more than {NOTE_BYTES}")
        note = self._notes[at + LENGTH.size : at + LENGTH.size + length].tobytes()
        self._free.post()
        return note


class Mailboxes:
    """All mailboxes of one server, in a segment of `mailboxes_bytes(nranks)` that it has created and trainers map."""

    def __init__(self, segment: Segment, nranks: int, *, create: bool = False) -> None:
        self.segment = segment
        self.bell = Semaphore(segment, 0, create=create)
        places = range(SEMAPHORE_BYTES, mailboxes_bytes(nranks), MAILBOX_BYTES)
        self.to_server = [Mailbox(segment, at, bell=self.bell, create=create) for at in places[:nranks]]
        self.to_trainer = [Mailbox(segment, at, create=create) for at in places[nranks:]]


def mailboxes_bytes(nranks: int) -> int:
    return SEMAPHORE_BYTES + 2 * nranks * MAILBOX_BYTES
