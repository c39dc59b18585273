"""Chunks, layouts and optimizers to protobuf messages and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from common.errors import ProtocolError
from common.network.gradsync_pb2 import Bucket as BucketMessage
from common.network.gradsync_pb2 import Chunk, Configure, Gather, Register, StatePiece
from common.network.gradsync_pb2 import Optimizer as OptimizerMessage
from common.network.gradsync_pb2 import Slot as SlotMessage
from common.network.rpc import CHUNK_BYTES
from common.tensors.arena import Arena, FloatArray, Layout, Slot
from common.tensors.buckets import Bucket, pieces_of
from common.tensors.optimizers import Optimizer, make_optimizer
from common.tensors.parts import Accumulator

__all__ = [
    "MOST_DIMENSIONS",
    "MOST_SLOTS",
    "data_of",
    "describe",
    "layout_of",
    "optimizer_message",
    "optimizer_of",
    "pieces",
    "state_of",
    "state_pieces",
]

FLOAT32 = np.dtype("<f4")
DTYPES = ("float32", "float64")
MOST_SLOTS = 1 << 16  # parameters of a model
MOST_DIMENSIONS = 32  # of one


def data_of(chunk: Chunk) -> FloatArray:
    """The words of a chunk, without a copy.

    Raises:
        ProtocolError: not a whole number of words.
    """
    if len(chunk.data) % FLOAT32.itemsize:
        raise ProtocolError(f"a chunk of {len(chunk.data)} bytes at step {chunk.step} is not float32 data")
    return np.frombuffer(chunk.data, FLOAT32)


def pieces(data: bytes, *, epoch: int, sequence: int) -> Iterator[Gather]:
    """One side's part of an all-gather; at least one message."""
    for start in range(0, max(len(data), 1), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        yield Gather(epoch=epoch, sequence=sequence, size=len(data), data=part)


def describe(arena: Arena, optimizer: Optimizer | None, *, rank: int, epoch: int) -> Register:
    """What a trainer tells a server about itself."""
    return Register(
        epoch=epoch,
        rank=rank,
        slots=[SlotMessage(name=s.name, shape=s.shape, start=s.start, dtype=s.dtype) for s in arena.layout.slots],
        length=arena.layout.length,
        buckets=[BucketMessage(start=b.start, stop=b.stop, dtype=b.dtype) for b in arena.buckets],
        optimizer=optimizer_message(optimizer) if optimizer else None,
    )


def optimizer_message(optimizer: Optimizer) -> OptimizerMessage:
    return OptimizerMessage(name=optimizer.name, settings=optimizer.settings())


def layout_of(message: Register) -> tuple[Layout, tuple[Bucket, ...]]:
    """
    Raises:
        ProtocolError: a dtype that cannot be synchronised.
    """
    for dtype in {each.dtype for each in message.slots} | {each.dtype for each in message.buckets}:
        if dtype not in DTYPES:
            raise ProtocolError(f"rank {message.rank} registered dtype {dtype!r}, not one of {', '.join(DTYPES)}")
    slots = tuple(Slot(s.name, tuple(s.shape), s.start, s.dtype) for s in message.slots)
    return Layout(slots, message.length), tuple(Bucket(b.start, b.stop, b.dtype) for b in message.buckets)


def optimizer_of(message: Register | Configure) -> Optimizer | None:
    if not message.HasField("optimizer"):
        return None
    return make_optimizer(message.optimizer.name, dict(message.optimizer.settings))


def state_pieces(state: Sequence[Accumulator], *, epoch: int, request: int = 0) -> Iterator[StatePiece]:
    """An optimizer state as messages, numbered; the last one is marked.

    Args:
        request: of a trainer, which they answer.
    """
    number = count()
    for each in state:
        limit = CHUNK_BYTES // each.values.itemsize
        for start, stop in pieces_of(0, each.values.size, limit):
            yield StatePiece(
                epoch=epoch,
                key=each.key,
                slot=each.slot,
                dtype=each.values.dtype.name,
                size=each.size,
                first=each.first + start,
                data=each.values[start:stop].tobytes(),
                number=next(number),
                request=request,
            )
    yield StatePiece(epoch=epoch, last=True, number=next(number), request=request)


def state_of(pieces: Sequence[StatePiece]) -> list[Accumulator]:
    """The state that such messages carry, the runs of each accumulator joined.

    Raises:
        ProtocolError: a piece is missing or came twice, a dtype that no accumulator has, or not a whole number of
            elements.
    """
    runs: dict[str, list[StatePiece]] = {}
    for number, piece in enumerate(pieces):
        if piece.number != number:
            raise ProtocolError(f"piece {piece.number} of an optimizer state came where piece {number} was expected")
        if piece.key:
            runs.setdefault(piece.key, []).append(piece)
    found = []
    for key, of_key in runs.items():
        head = of_key[0]
        if head.dtype not in DTYPES:
            raise ProtocolError(f"optimizer state {key} is {head.dtype!r}, not one of {', '.join(DTYPES)}")
        data = b"".join(piece.data for piece in of_key)
        if len(data) % np.dtype(head.dtype).itemsize:
            raise ProtocolError(f"optimizer state {key} has {len(data)} bytes, not whole {head.dtype} data")
        found.append(Accumulator(key, head.slot, head.size, head.first, np.frombuffer(data, head.dtype)))
    return found
