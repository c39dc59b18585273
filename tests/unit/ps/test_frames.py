"""Chunks on the wire: what protobuf would write and read, word by word, and whatever else may arrive."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from common.network.gradsync_pb2 import Chunk, Gather, Register, ServerMessage, StatePiece, TrainerMessage
from common.network.rpc import CHUNK_BYTES, OPTIONS
from common.tensors.arena import FloatArray
from ps.planes.frames import frames, read_server, read_trainer, to_bytes, varint

PER_CHUNK = 262_144  # elements: 1 MiB of float32
U32, U64 = (1 << 32) - 1, (1 << 64) - 1


def values(size: int) -> FloatArray:
    return np.random.default_rng(size).standard_normal(size).astype(np.float32)


SIZES = [(0, 0), (1, 1), (17, 1), (255, 1), (256, 1), (PER_CHUNK - 1, 1), (PER_CHUNK, 1), (PER_CHUNK + 1, 2)]


@pytest.mark.parametrize(("size", "pieces"), [*SIZES, (3 * PER_CHUNK, 3), (3 * PER_CHUNK + 5, 4)])
def test_an_array_comes_back_and_protobuf_reads_the_same(size: int, pieces: int) -> None:
    array = values(size)
    sent = [to_bytes(m) for m in frames(TrainerMessage, "gradients", array, first=32, epoch=2, step=7, bucket=3)]
    assert len(sent) == pieces
    back, by_protobuf = (np.full(size, np.nan, np.float32) for _ in range(2))
    for data in sent:
        frame, message = read_trainer(data), TrainerMessage.FromString(data)
        chunk = frame.message.gradients
        assert (chunk.epoch, chunk.step, chunk.bucket) == (2, 7, 3)
        received = np.frombuffer(chunk.data, np.float32) if frame.words is None else frame.words
        assert (frame.words is None) == (len(data) < 1024)
        back[chunk.start - 32 : chunk.start - 32 + received.size] = received
        words = np.frombuffer(message.gradients.data, np.float32)
        by_protobuf[message.gradients.start - 32 :][: words.size] = words
        assert message.SerializeToString() == data
        assert frame.words is None or frame.words.ctypes.data % 16 == 0
    assert back.tobytes() == by_protobuf.tobytes() == array.tobytes()


def test_words_are_not_copied_on_arrival() -> None:
    (message,) = frames(ServerMessage, "parameters", values(5000), first=0, epoch=0, step=1)
    data = to_bytes(message)
    frame = read_server(data)
    assert frame.words is not None
    assert np.shares_memory(frame.words, np.frombuffer(data, np.uint8))
    assert not frame.message.parameters.data


def test_chunks_follow_one_another_in_ascending_order() -> None:
    found = frames(ServerMessage, "parameters", values(2 * PER_CHUNK + 1), first=100, epoch=0, step=0)
    starts = [read_server(to_bytes(message)).message.parameters.start for message in found]
    assert starts == [100, 100 + PER_CHUNK, 100 + 2 * PER_CHUNK]


def test_words_are_read_only_when_sent() -> None:
    array = values(PER_CHUNK + 1000)
    pieces = frames(TrainerMessage, "gradients", array, first=0, epoch=0, step=0)
    next(pieces)
    array[-1] = 42.0
    words = read_trainer(to_bytes(next(pieces))).words
    assert words is not None
    assert words[-1] == 42.0


@pytest.mark.parametrize("size", [*range(248, 262), *range(4080, 4100)])
def test_words_begin_at_a_multiple_of_16_bytes_whatever_comes_before_them(size: int) -> None:
    """Near sizes at which a length takes another byte; with heads of every length."""
    array = values(size)
    for step in (0, *(1 << (7 * digits) for digits in range(9))):
        for epoch, first in ((0, 0), (1, 0), (1, 1 << 14), (U32, 1 << 20)):
            (message,) = frames(TrainerMessage, "gradients", array, first=first, epoch=epoch, step=step)
            data = to_bytes(message)
            frame = read_trainer(data)
            assert TrainerMessage.FromString(data).SerializeToString() == data
            if frame.words is None:
                assert len(data) < 1024
            else:
                assert frame.words.ctypes.data % 16 == 0
                assert frame.words.tobytes() == array.tobytes()


@pytest.mark.parametrize("size", [1, 127, 128, 5000])
def test_any_padding_that_protobuf_writes_is_passed_over(size: int) -> None:
    chunk = Chunk(step=3, start=16, padding=bytes(size), data=values(1000).tobytes())
    frame = read_trainer(TrainerMessage(gradients=chunk).SerializeToString())
    assert frame.words is not None
    assert frame.words.tobytes() == chunk.data
    assert frame.message.gradients.start == 16


def test_chunks_are_little_endian_float32() -> None:
    (message,) = frames(TrainerMessage, "gradients", np.array([1.0, -2.5], ">f4"), first=0, epoch=0, step=0)
    assert TrainerMessage.FromString(to_bytes(message)).gradients.data == bytes.fromhex("0000803f000020c0")


def test_special_values_keep_their_bits() -> None:
    bits = np.array([0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x00000001] * 100, np.uint32)
    (message,) = frames(TrainerMessage, "gradients", bits.view(np.float32), first=0, epoch=0, step=0)
    words = read_trainer(to_bytes(message)).words
    assert words is not None
    np.testing.assert_array_equal(words.view(np.uint32), bits)


def test_the_largest_chunk_message_stays_under_grpcs_limit() -> None:
    (message,) = frames(TrainerMessage, "gradients", values(PER_CHUNK), first=U64, epoch=U32, step=U64, bucket=U32)
    limits = dict(OPTIONS)
    assert CHUNK_BYTES < len(to_bytes(message)) < limits["grpc.max_send_message_length"]
    assert limits["grpc.max_send_message_length"] == limits["grpc.max_receive_message_length"]


@pytest.mark.parametrize("size", [1, 1023, 4099])
def test_what_are_no_whole_words_is_left_in_the_message(size: int) -> None:
    """Where it is refused by name (test_wire.py)."""
    message = TrainerMessage(gradients=Chunk(step=5, data=bytes(size)))
    frame = read_trainer(message.SerializeToString())
    assert frame.words is None
    assert frame.message == message


def in_another_order(chunk: Chunk) -> bytes:
    """The words first, which protobuf allows."""
    inner = (
        b"\x32" + varint(len(chunk.data)) + chunk.data + Chunk(step=chunk.step, start=chunk.start).SerializeToString()
    )
    return b"\x1a" + varint(len(inner)) + inner


def test_what_another_protobuf_writes_is_read_too() -> None:
    chunk = Chunk(step=3, start=16, data=values(1000).tobytes())
    frame = read_trainer(in_another_order(chunk))
    assert frame.words is None
    assert frame.message.gradients == chunk


OTHERS = [
    TrainerMessage(gather=Gather(size=5000, data=bytes(5000))),
    TrainerMessage(register=Register(epoch=1, length=1 << 40)),
    TrainerMessage(gradients=Chunk(step=2, start=16, size=1 << 30)),
    TrainerMessage(state=StatePiece(key="w_moment1_0", data=bytes(3000))),
    TrainerMessage(),
]


@pytest.mark.parametrize("message", OTHERS, ids=lambda m: str(m.WhichOneof("kind")))
def test_other_messages_are_protobufs(message: TrainerMessage) -> None:
    frame = read_trainer(to_bytes(message))
    assert frame.message == message
    assert frame.words is None


@given(st.binary(max_size=60), st.integers(0, 2000), st.integers(0, 40))
def test_anything_is_read_as_protobuf_reads_it_or_refused(noise: bytes, size: int, at: int) -> None:
    """A message with bytes put in, cut off, or replaced by noise."""
    whole = to_bytes(next(frames(TrainerMessage, "gradients", values(1 + size), first=16, epoch=1, step=2)))
    for data in (whole[:at] + noise + whole[at:], whole[: len(whole) - at], noise, noise + bytes(2000)):
        try:
            expected = TrainerMessage.FromString(data)
        except DecodeError:
            with pytest.raises(DecodeError):
                read_trainer(data)
            continue
        frame = read_trainer(data)
        if frame.words is not None:
            chunk = getattr(frame.message, frame.message.WhichOneof("kind"))
            assert not chunk.data
            chunk.data = frame.words.tobytes()
        assert frame.message == expected
