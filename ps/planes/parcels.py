"""How messages between trainers are cut, and how much of them may be on its way: a server only passes them on.

Who sends has ROOM_BYTES, for all its receivers together, and again when these have taken what was sent, each into its
own memory. So that is all that a server ever has of a trainer's, also for a receiver that is stopped. A receiver holds
HELD_BYTES that its program has not asked for; beyond that it only makes room for the rank whose message is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.network.gradsync_pb2 import Parcel
from common.network.rpc import CHUNK_BYTES

__all__ = ["HELD_BYTES", "ROOM_BYTES", "cost_of", "parcels_of"]

ROOM_BYTES = 8 << 20
HELD_BYTES = 1 << 30
PARCEL_BYTES = 256  # that a parcel takes beside its data


def cost_of(parcel: Parcel) -> int:
    """How much of the room it takes."""
    return len(parcel.data) + PARCEL_BYTES


def parcels_of(data: memoryview, *, epoch: int, rank: int, channel: int) -> Iterator[Parcel]:
    """A message of bytes to a rank, in pieces, each a copy; at least one."""
    for start in range(0, max(len(data), 1), CHUNK_BYTES):
        part = bytes(data[start : start + CHUNK_BYTES])
        yield Parcel(epoch=epoch, rank=rank, channel=channel, size=len(data), data=part)
