"""What a trainer's messages must be before anything is made of them: counts, sizes and places are checked here.

A message comes from a trainer with a seat, whose mistakes fail its group, by name; never by a lack of memory, or by an
error that names nobody.
"""

from __future__ import annotations

from common.errors import ProtocolError, SharedMemoryTooSmall, UsageError
from common.network.gradsync_pb2 import Gather, Register, StatePiece
from common.network.rpc import CHUNK_BYTES
from common.system.memory import free_bytes
from common.tensors.arena import Layout
from common.tensors.buckets import Bucket, words
from ps.planes.protobuf_messages import MOST_DIMENSIONS, MOST_SLOTS, layout_of
from ps.store.modes import Mode
from ps.store.shards import Shard

__all__ = ["check_gather", "check_layout", "check_memory", "check_sizes", "check_states", "check_used"]

MOST_NAME = 4096  # characters
MOST_COUNTS = 1 << 23  # a server counts what each rank has delivered of each bucket of each step that is kept
MOST_STATES = 16  # arrays that an optimizer keeps beside its parameters, and more
PIECE_COST = 256  # bytes that a message takes beside its data
LARGE = 1 << 26  # bytes; whether there is so much memory is looked up for what is larger


def check_sizes(register: Register, rank: int) -> None:
    """
    Raises:
        ProtocolError: it is not of this rank, or of more than a model has.
    """
    who = f"rank {rank}"
    if register.rank != rank:
        raise ProtocolError(f"{who} registered as rank {register.rank}")
    if len(register.slots) > MOST_SLOTS:
        raise ProtocolError(f"{who} registered {len(register.slots):,} parameters; at most {MOST_SLOTS:,} can be")
    if len(register.mode) > MOST_NAME or len(register.buckets) > max(1, len(register.slots)):
        raise ProtocolError(f"{who} registered {len(register.buckets):,} buckets of {len(register.slots):,} parameters")
    for slot in register.slots:
        if len(slot.name) > MOST_NAME or len(slot.shape) > MOST_DIMENSIONS:
            raise ProtocolError(f"{who} registered a parameter of {len(slot.shape)} dimensions: {slot.name[:80]!r}")


def check_layout(register: Register, rank: int) -> None:
    """Of one that `check_sizes` has passed.

    Raises:
        ProtocolError: it describes no arena and no bucket plan.
    """
    who = f"rank {rank}"
    layout, buckets = layout_of(register)
    at = 0
    for each in layout.slots:
        if each.start < at or each.stop > layout.length or each.start % words(each.dtype):
            raise ProtocolError(f"{who} registered {each.describe()[:80]} at {each.start}, where it cannot lie")
        at = each.stop
    check_buckets(buckets, layout, who)


def check_buckets(buckets: tuple[Bucket, ...], layout: Layout, who: str) -> None:
    """They cover the arena, each word once."""
    at = 0
    for bucket in sorted(buckets, key=lambda each: each.start):
        odd = bucket.start % words(bucket.dtype) or bucket.stop % words(bucket.dtype)
        if bucket.start != at or bucket.stop <= at or odd:
            raise ProtocolError(f"{who} registered a bucket of words {bucket.start}..{bucket.stop} after word {at}")
        at = bucket.stop
    if at != layout.length:
        raise ProtocolError(f"{who} registered buckets of {at:,} words of an arena of {layout.length:,}")


def check_memory(rank: int, register: Register, mode: Mode, shard: Shard, nranks: int) -> None:
    """Whether the server has room for its part of what a trainer registers, where it keeps it in memory of its own.

    Raises:
        SharedMemoryTooSmall, UsageError: it has not.
    """
    needed = 2 * 4 * shard.length
    if needed > LARGE and needed > (free := free_bytes()):
        raise SharedMemoryTooSmall(
            f"rank {rank} registered parameters of which this server keeps {needed:,} bytes, and has {free:,} free; "
            "use a smaller model or more servers"
        )
    counts = ((mode.staleness or 0) + 1) * nranks * len(register.buckets)
    if counts > MOST_COUNTS:
        raise UsageError(
            f"rank {rank} registered {len(register.buckets):,} buckets for --mode {mode}, too many for {nranks} ranks; "
            "use larger buckets or a smaller --staleness"
        )


def check_states(nbytes: int, piece: StatePiece, shard: Shard, slots: int) -> int:
    """Whether another piece may follow those that take so much memory; how much they take with it.

    Raises:
        ProtocolError: an optimizer state is never so large.
    """
    nbytes += len(piece.data) + len(piece.key) + PIECE_COST
    if nbytes > MOST_STATES * (4 * shard.length + MOST_NAME * (slots + 1)):
        raise ProtocolError(f"rank 0 sent {nbytes:,} bytes of optimizer state for {shard.length:,} words")
    return nbytes


def check_used(used: bytes, rank: int, slots: int) -> None:
    """
    Raises:
        ProtocolError: what is told of the parameters that were used is not of so many.
    """
    if used and not slots <= len(used) <= MOST_SLOTS:
        raise ProtocolError(f"rank {rank} told of {len(used):,} parameters, registered were {slots:,}")


def check_gather(gather: Gather, rank: int, begun: int, nranks: int) -> None:
    """Whether there is room for a trainer's part of an all-gather, once all have sent theirs and they are joined.

    Raises:
        ProtocolError: there is not, or it is more than was said.
    """
    if len(gather.data) > CHUNK_BYTES or begun + len(gather.data) > gather.size:
        raise ProtocolError(f"rank {rank} sent {begun + len(gather.data):,} bytes of a gather of {gather.size:,}")
    needed = 2 * nranks * gather.size
    if not begun and needed > LARGE and needed > (free := free_bytes()):
        raise ProtocolError(
            f"rank {rank} began a gather of {gather.size:,} bytes, for which this server needs {needed:,} and has "
            f"{free:,}; gather less at a time"
        )
