"""Messages to bytes and back; words go apart, so that they are copied once instead of four times.

A message that carries words is a header and the words, whatever its kind:

    0 (u8), field of the message (u8), 0 (u16), epoch (u32), bucket (u32), 0 (u32), step (u64), start (u64) | words

all little-endian. Every other message is protobuf's, none of which begins with a zero. Words begin at a multiple of 16
bytes, where arithmetic on them is fast.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from common.network.gradsync_pb2 import Chunk, ServerMessage, TrainerMessage
from common.network.rpc import CHUNK_BYTES
from common.tensors.arena import FloatArray
from common.tensors.buckets import pieces_of
from ps.planes.wire import FLOAT32

__all__ = ["Frame", "Outgoing", "frames", "read_server", "read_trainer", "to_bytes"]

M = TypeVar("M", TrainerMessage, ServerMessage)

HEADER = struct.Struct("<BBxxIIxxxxQQ")  # 32 bytes
MARK = 0  # a protobuf message begins with a tag, which is not zero


@dataclass(frozen=True)
class Frame(Generic[M]):
    """A message as received, and the words of its chunk apart from it, without a copy; None: what it has is in it."""

    message: M
    words: FloatArray | None


@dataclass(frozen=True)
class Outgoing:
    """A chunk on its way out: the number of the field that it is, its fields but the words, and the words."""

    field: int
    chunk: Chunk
    words: FloatArray


def frames(
    kind: type[M], name: str, array: FloatArray, *, first: int, epoch: int, step: int, bucket: int = 0
) -> Iterator[Outgoing]:
    """`array` as messages `kind(name=Chunk(...))`, lazily; `first` is where in the arena it begins."""
    field = kind.DESCRIPTOR.fields_by_name[name].number
    for start, stop in pieces_of(0, array.size, CHUNK_BYTES // 4):
        chunk = Chunk(epoch=epoch, step=step, bucket=bucket, start=first + start)
        yield Outgoing(field, chunk, array[start:stop].astype(FLOAT32, copy=False))


def to_bytes(message: Outgoing | TrainerMessage | ServerMessage) -> bytes:
    """What goes over the wire; the words are read now."""
    if not isinstance(message, Outgoing):
        return message.SerializeToString()
    chunk = message.chunk
    header = HEADER.pack(MARK, message.field, chunk.epoch, chunk.bucket, chunk.step, chunk.start)
    return b"".join((header, message.words.data))


def read_trainer(data: bytes) -> Frame[TrainerMessage]:
    """
    Raises:
        google.protobuf.message.DecodeError: it is no message.
    """
    return read(TrainerMessage, data)


def read_server(data: bytes) -> Frame[ServerMessage]:
    """As `read_trainer`."""
    return read(ServerMessage, data)


def read(kind: type[M], data: bytes) -> Frame[M]:
    if not data or data[0] != MARK:
        return Frame(kind.FromString(data), None)
    size = len(data) - HEADER.size
    field = kind.DESCRIPTOR.fields_by_number.get(data[1]) if size > 0 and size % FLOAT32.itemsize == 0 else None
    if field is None or field.message_type is not Chunk.DESCRIPTOR:
        raise DecodeError(f"{len(data)} bytes are no words with a header")
    _, _, epoch, bucket, step, start = HEADER.unpack_from(data)
    message = kind()
    getattr(message, field.name).MergeFrom(Chunk(epoch=epoch, bucket=bucket, step=step, start=start))
    return Frame(message, np.frombuffer(data, FLOAT32, offset=HEADER.size))
