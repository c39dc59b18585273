"""Chunks to bytes and back with one copy of their words instead of four: standard protobuf encoding, put together and
taken apart around the words.

A message that carries a chunk ends with the chunk's words, whatever its kind:

    tag, length of all that follows, the chunk's other fields, padding, tag, length of the words | words

Any protobuf parser reads such a message (https://protobuf.dev/programming-guides/encoding), and what another one wrote
in another order is read by protobuf itself here. Padding lets the words begin where arithmetic on them is fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from common.network.gradsync_pb2 import Chunk, ServerMessage, TrainerMessage
from common.network.rpc import CHUNK_BYTES
from common.tensors.arena import FloatArray
from common.tensors.buckets import segments
from ps.planes.wire import FLOAT32

__all__ = ["Frame", "Outgoing", "frames", "read_server", "read_trainer", "to_bytes"]

M = TypeVar("M", TrainerMessage, ServerMessage)

BYTES = 2  # wire type of a field that is a length and so many bytes
DATA_TAG, PADDING_TAG = (Chunk.DESCRIPTOR.fields_by_name[name].number << 3 | BYTES for name in ("data", "padding"))
WORTH_BYTES = 1024  # smaller messages are protobuf's
ALIGNED_TO = 16  # bytes; so is the memory of `bytes`, from its first one on


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
    for start, stop in segments(0, array.size, CHUNK_BYTES // 4):
        chunk = Chunk(epoch=epoch, step=step, bucket=bucket, start=first + start)
        yield Outgoing(field, chunk, array[start:stop].astype(FLOAT32, copy=False))


def to_bytes(message: Outgoing | TrainerMessage | ServerMessage) -> bytes:
    """What goes over the wire; the words are read now."""
    if not isinstance(message, Outgoing):
        return message.SerializeToString()
    head = head_of(message)
    missing = -len(head) % ALIGNED_TO
    if missing and len(head) + message.words.nbytes >= WORTH_BYTES:
        size = (missing - 3) % ALIGNED_TO + 1  # besides its tag and length
        head = head_of(message, size)
        if len(head) % ALIGNED_TO:  # it has made a length before it one byte longer
            head = head_of(message, size + ALIGNED_TO - 1)
    return b"".join((head, message.words.data))


def head_of(message: Outgoing, padding: int = 0) -> bytes:
    """All that comes before the words, with so many bytes of padding."""
    nbytes = message.words.nbytes
    message.chunk.padding = bytes(padding)
    inner = message.chunk.SerializeToString() + bytes([DATA_TAG]) + varint(nbytes)
    return bytes([message.field << 3 | BYTES]) + varint(len(inner) + nbytes) + inner


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
    at = where_words_begin(data)
    field = kind.DESCRIPTOR.fields_by_number.get(data[0] >> 3) if at else None
    if at is None or field is None or field.message_type is not Chunk.DESCRIPTOR:
        return Frame(kind.FromString(data), None)
    header_end, begin = at
    _, inner = read_varint(data, 1)
    message = kind()
    getattr(message, field.name).MergeFromString(data[inner:header_end])
    return Frame(message, np.frombuffer(data, FLOAT32, offset=begin))


def where_words_begin(data: bytes) -> tuple[int, int] | None:
    """(where the tag of the words is, where they begin) if this is a chunk that ends with its words; else None."""
    if len(data) < WORTH_BYTES or data[0] & 7 != BYTES:
        return None
    length, at = read_varint(data, 1)
    if at + length != len(data):
        return None
    while at < len(data):
        tag = data[at]
        if tag == DATA_TAG:
            size, begin = read_varint(data, at + 1)
            return (at, begin) if begin + size == len(data) and size % FLOAT32.itemsize == 0 else None
        value, at = read_varint(data, at + 1)
        if tag == PADDING_TAG:
            at += value
        elif tag & 7:  # the other fields of a chunk are whole numbers
            return None
    return None


def varint(value: int) -> bytes:
    """
    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends; (0, len(data)) if it is cut off or too long."""
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    return 0, len(data)
