"""The transport between processes of one host: a message is a note of where the data lies in shared memory.

Each rank owns a control segment that its right neighbour maps:

    sent      semaphore: a note was written        (posted by the owner, waited on by the neighbour)
    taken     semaphore: a note's data was used    (the other way round)
    notes     SLOTS x (tag, segment, offset, bytes)
    bounce    SLOTS x SEGMENT_BYTES, for arrays that do not lie in shared memory

and as many data segments as `empty` made. Descriptors travel over the mesh's Unix sockets; nothing has a name.
"""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from collective.transports.base import SEGMENT_BYTES, Array, Tag, Transport
from collective.transports.mesh import Mesh
from collective.transports.segments import CONTROL, SharedSegments
from common.system.memory import Segment
from common.system.semaphore import SEMAPHORE_BYTES, Semaphore

__all__ = ["ShmTransport"]

SLOTS = 16
NOTE = struct.Struct("<24sIQQ")  # packed tag, segment number, offset, bytes
NOTE_BYTES = 64
NOTES_AT = 2 * SEMAPHORE_BYTES
BOUNCE_AT = 4096
CONTROL_BYTES = BOUNCE_AT + SLOTS * SEGMENT_BYTES
SLICE_S = 0.05  # a sleeping rank looks this often whether somebody died


class Control:
    """The control segment, seen from either side."""

    def __init__(self, segment: Segment, *, create: bool) -> None:
        self.segment = segment
        self.sent = Semaphore(segment, 0, create=create)
        self.taken = Semaphore(segment, SEMAPHORE_BYTES, create=create)
        self.notes = [segment.array(NOTES_AT + i * NOTE_BYTES, NOTE_BYTES, np.uint8).data for i in range(SLOTS)]


class ShmTransport(Transport):
    """Ring over shared memory: arrays from `empty` are read by the neighbour where they lie."""

    name = "shm"

    def __init__(self, mesh: Mesh, nranks: int) -> None:
        self.rank, self.nranks, self.timeout = mesh.rank, nranks, mesh.timeout
        self._mesh = mesh
        self._segments = SharedSegments(mesh, [self.right])
        self._out = Control(self._segments.create(CONTROL_BYTES), create=True)
        self._segments.share(CONTROL)
        self._in = Control(self._segments.of(self.left, CONTROL), create=False)
        self._sent = self._received = 0
        self._credits = SLOTS
        self._borrowed = False

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        return self._segments.empty(count, dtype)

    def send(self, array: Array, tag: Tag) -> None:
        if not self._credits:
            self._wait(self._out.taken, self.right, "sending")
            self._credits += 1
        self._credits -= 1
        slot = self._sent % SLOTS
        self._sent += 1
        number, offset = self._locate(array, slot)
        NOTE.pack_into(self._out.notes[slot], 0, tag.pack(), number, offset, array.nbytes)
        self._out.sent.post()

    def receive(self, like: Array, tag: Tag) -> Array:
        self._release()
        self._wait(self._in.sent, self.left, "waiting for data")
        note = self._in.notes[self._received % SLOTS]
        self._received += 1
        packed, number, offset, nbytes = NOTE.unpack_from(note)
        tag.check(Tag.unpack(packed), self.left)
        tag.check_size(nbytes, like.nbytes, self.left)
        self._borrowed = True
        return self._segments.of(self.left, number).array(offset, like.size, like.dtype)

    def flush(self) -> None:
        self._release()
        while self._credits < SLOTS:
            self._wait(self._out.taken, self.right, "waiting for its data to be read")
            self._credits += 1

    def close(self, reason: str = "") -> None:
        self._release()
        self._mesh.close(reason)
        self._segments.close()

    def _locate(self, array: Array, slot: int) -> tuple[int, int]:
        """Where the neighbour finds the array's bytes: where they lie, or in this slot's bounce buffer."""
        where = self._segments.locate(array)
        if where is not None:
            self._segments.share(where[0])
            return where
        at = BOUNCE_AT + slot * SEGMENT_BYTES
        bounce: npt.NDArray[Any] = self._out.segment.array(at, array.size, array.dtype)
        np.copyto(bounce, array)
        return CONTROL, at

    def _release(self) -> None:
        if self._borrowed:
            self._borrowed = False
            self._in.taken.post()

    def _wait(self, semaphore: Semaphore, peer: int, doing: str) -> None:
        if semaphore.wait(SLICE_S):
            return
        deadline = time.monotonic() + self.timeout - SLICE_S
        while True:
            self._mesh.check()
            had_left = self._mesh.has_left(peer)  # what it posted before it left counts
            if semaphore.wait(0 if had_left else SLICE_S):
                return
            if had_left:
                self._mesh.check(peer, doing)
            if time.monotonic() > deadline:
                raise self._mesh.stalled(peer, doing)
