"""How ranks of one host begin a call: they meet, compare what all are about to do, and learn where the arrays lie."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from collective.call_tags import Array, Label, Tag
from collective.shared_memory.barrier import SharedMemoryBarrier

__all__ = ["ELSEWHERE", "PLACE", "agree", "array_at", "place_of", "places_of", "segment_at"]

# Step, epoch, bucket, phase, chunk, piece of a tag, and bytes: these must agree; then the place of the array.
NOTE = struct.Struct("<QIIHHIQ16s")
PLACE = struct.Struct("<QQ")  # segment number, offset in bytes
ELSEWHERE = PLACE.pack(0, 0)  # of an array that is not from `empty`: data segments count from 1


def place_of(barrier: SharedMemoryBarrier, array: Array) -> bytes:
    """By which the others find this rank's contiguous array; ELSEWHERE if they cannot reach it."""
    where = barrier.locate(array)
    return PLACE.pack(*where) if where else ELSEWHERE


def agree(
    barrier: SharedMemoryBarrier, label: Label, phase: int, nbytes: int, *, root: int = 0, place: bytes = ELSEWHERE
) -> list[bytes]:
    """Meet the other ranks; returns the place of everyone's array.

    Raises:
        StaleEpoch, ProtocolError: a rank is about to do something else.
    """
    epoch, step, bucket = label
    notes = barrier.exchange(NOTE.pack(step, epoch, bucket, phase, root, 0, nbytes, place))
    return places_of(barrier, notes) if notes else [place] * barrier.nranks


def places_of(barrier: SharedMemoryBarrier, notes: Sequence[bytes]) -> list[bytes]:
    """Of everyone's array, when the notes of a meeting were not all equal; raises as `agree`."""
    for rank, note in zip(barrier.ranks, notes, strict=True):
        check(notes[barrier.rank], note, rank)
    return [note[-PLACE.size :] for note in notes]


def array_at(barrier: SharedMemoryBarrier, rank: int, place: bytes, like: Array) -> Array:
    """The array of `rank` (counted as the barrier does) at its place, of the size and dtype that all have."""
    number, offset = PLACE.unpack(place)
    return barrier.array_of(rank, number, offset, like.size, like.dtype)


def segment_at(place: bytes) -> int:
    """The number of the segment that a place is in."""
    number: int = PLACE.unpack(place)[0]
    return number


def check(mine: bytes, theirs: bytes, rank: int) -> None:
    tag, expected_bytes = tag_of(mine)
    got, got_bytes = tag_of(theirs)
    tag.check(got, rank)
    tag.check_size(got_bytes, expected_bytes, rank)


def tag_of(note: bytes) -> tuple[Tag, int]:
    step, epoch, bucket, phase, chunk, piece, nbytes, _ = NOTE.unpack(note)
    return Tag(epoch, step, bucket, phase, chunk, piece), nbytes
