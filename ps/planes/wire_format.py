"""Messages to bytes and back; words go apart, so that they are copied once instead of four times.

A message that carries words is a header and the words, whatever its kind:

    0 (u8), field of the message (u8), 0 (u16), epoch (u32), bucket (u32), 0 (u32), step (u64), start (u64) | words

all little-endian. Every other message is protobuf's, none of which begins with a zero. Words begin at a multiple of 16
bytes, where arithmetic on them is fast.

On a data connection the header is the tag of a frame of common/network/links.py, and field 0 tells that its payload is
a protobuf message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from common.network.gradsync_pb2 import Chunk, ServerMessage, TrainerMessage
from common.network.rpc import CHUNK_BYTES
from common.tensors.arena import FloatArray
from common.tensors.buckets import pieces_of
from ps.planes.protobuf_messages import FLOAT32

__all__ = [
    "TAG_BYTES",
    "Frame",
    "Outgoing",
    "frames",
    "parts_of",
    "read_server",
    "read_trainer",
    "tagged",
    "told_by",
]

M = TypeVar("M", TrainerMessage, ServerMessage)
Part = bytes | memoryview

HEADER = struct.Struct("<BBxxIIxxxxQQ")  # 32 bytes
MARK = 0  # a protobuf message begins with a tag, which is not zero
TAG_BYTES = HEADER.size
WITHOUT_WORDS = bytes(TAG_BYTES)


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
    kind: type[M],
    name: str,
    array: FloatArray,
    *,
    first: int,
    epoch: int,
    step: int,
    bucket: int = 0,
    most: int = CHUNK_BYTES,
) -> Iterator[Outgoing]:
    """`array` as messages `kind(name=Chunk(...))`, lazily; `first` is where in the arena it begins, `most` how many
    bytes of it a message has."""
    field = kind.DESCRIPTOR.fields_by_name[name].number
    for start, stop in pieces_of(0, array.size, most // 4):
        chunk = Chunk(epoch=epoch, step=step, bucket=bucket, start=first + start)
        yield Outgoing(field, chunk, array[start:stop].astype(FLOAT32, copy=False))


def parts_of(message: Outgoing | TrainerMessage | ServerMessage) -> tuple[Part, ...]:
    """What goes over the wire, one after the other; the words are still where they were."""
    if not isinstance(message, Outgoing):
        return (message.SerializeToString(),)
    return header_of(message), message.words.data


def tagged(message: Outgoing | TrainerMessage | ServerMessage) -> tuple[npt.NDArray[Any], bytes]:
    """What goes over a data connection: the payload, which of a chunk are the words themselves, and its tag."""
    if isinstance(message, Outgoing):
        return message.words, header_of(message)
    return np.frombuffer(message.SerializeToString(), np.uint8), WITHOUT_WORDS


def header_of(message: Outgoing) -> bytes:
    chunk = message.chunk
    return HEADER.pack(MARK, message.field, chunk.epoch, chunk.bucket, chunk.step, chunk.start)


def told_by(kind: type[M], tag: Part) -> tuple[M, Chunk] | None:
    """The message that words with this tag belong to, and its chunk, in which they are missing; None: it is the tag of
    a message without words.

    Raises:
        google.protobuf.message.DecodeError: it is neither.
    """
    if tag == WITHOUT_WORDS:
        return None
    mark, number, epoch, bucket, step, start = HEADER.unpack(tag)
    field = kind.DESCRIPTOR.fields_by_number.get(number)
    if mark != MARK or field is None or field.message_type is not Chunk.DESCRIPTOR:
        raise DecodeError(f"no words have the number {number}")
    message = kind()
    chunk: Chunk = getattr(message, field.name)
    chunk.MergeFrom(Chunk(epoch=epoch, bucket=bucket, step=step, start=start))
    return message, chunk


def read_trainer(data: Part) -> Frame[TrainerMessage]:
    """
    Raises:
        google.protobuf.message.DecodeError: it is no message.
    """
    return read(TrainerMessage, data)


def read_server(data: Part) -> Frame[ServerMessage]:
    """As `read_trainer`."""
    return read(ServerMessage, data)


def read(kind: type[M], data: Part) -> Frame[M]:
    if not data or data[0] != MARK:
        return Frame(kind.FromString(bytes(data)), None)
    size = len(data) - HEADER.size
    found = told_by(kind, data[: HEADER.size]) if size > 0 and size % FLOAT32.itemsize == 0 else None
    if found is None:
        raise DecodeError(f"{len(data)} bytes are no words with a header")
    return Frame(found[0], np.frombuffer(data, FLOAT32, offset=HEADER.size))
