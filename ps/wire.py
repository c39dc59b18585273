"""Chunks, layouts and optimizers to protobuf messages and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from common.arena import Arena, FloatArray, Layout, Slot
from common.buckets import Bucket, segments
from common.errors import ProtocolError
from common.gradsync_pb2 import Bucket as BucketMessage
from common.gradsync_pb2 import Chunk, Gather, Register
from common.gradsync_pb2 import Optimizer as OptimizerMessage
from common.gradsync_pb2 import Slot as SlotMessage
from common.optimizers import Optimizer, make_optimizer
from common.rpc import CHUNK_BYTES

__all__ = ["chunks", "data_of", "describe", "layout_of", "optimizer_of", "pieces"]

CHUNK_ELEMENTS = CHUNK_BYTES // 4
FLOAT32 = np.dtype("<f4")


def chunks(array: FloatArray, *, first: int, epoch: int, step: int, bucket: int = 0) -> Iterator[Chunk]:
    """`array` as chunk messages, lazily; `first` is where in the arena it begins."""
    for start, stop in segments(0, array.size, CHUNK_ELEMENTS):
        data = array[start:stop].astype(FLOAT32, copy=False).tobytes()
        yield Chunk(epoch=epoch, step=step, bucket=bucket, start=first + start, data=data)


def data_of(chunk: Chunk) -> FloatArray:
    """The elements of a chunk, without a copy.

    Raises:
        ProtocolError: not a whole number of elements.
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
        slots=[SlotMessage(name=s.name, shape=s.shape, start=s.start) for s in arena.layout.slots],
        length=arena.layout.length,
        buckets=[BucketMessage(start=b.start, stop=b.stop) for b in arena.buckets],
        optimizer=OptimizerMessage(name=optimizer.name, settings=optimizer.settings()) if optimizer else None,
    )


def layout_of(message: Register) -> tuple[Layout, tuple[Bucket, ...]]:
    slots = tuple(Slot(s.name, tuple(s.shape), s.start) for s in message.slots)
    return Layout(slots, message.length), tuple(Bucket(b.start, b.stop) for b in message.buckets)


def optimizer_of(message: Register) -> Optimizer | None:
    if not message.HasField("optimizer"):
        return None
    return make_optimizer(message.optimizer.name, dict(message.optimizer.settings))
