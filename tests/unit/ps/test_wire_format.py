"""Words on the wire with their header, other messages, and whatever else may arrive."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from common.network.gradsync_pb2 import Chunk, Gather, Register, ServerMessage, StatePiece, TrainerMessage
from common.network.rpc import CHUNK_BYTES, OPTIONS
from common.tensors.arena import FloatArray
from ps.planes.wire_format import frames, read_server, read_trainer
from tests.support.wire import to_bytes

PER_CHUNK = 262_144  # elements: 1 MiB of float32
U32, U64 = (1 << 32) - 1, (1 << 64) - 1


def values(size: int) -> FloatArray:
    return np.random.default_rng(size).standard_normal(size).astype(np.float32)


SIZES = [(0, 0), (1, 1), (17, 1), (255, 1), (256, 1), (PER_CHUNK - 1, 1), (PER_CHUNK, 1), (PER_CHUNK + 1, 2)]


@pytest.mark.parametrize(("size", "pieces"), [*SIZES, (3 * PER_CHUNK, 3), (3 * PER_CHUNK + 5, 4)])
def test_an_array_comes_back(size: int, pieces: int) -> None:
    array = values(size)
    sent = [to_bytes(m) for m in frames(TrainerMessage, "gradients", array, first=32, epoch=2, step=7, bucket=3)]
    assert len(sent) == pieces
    back = np.full(size, np.nan, np.float32)
    for data in sent:
        frame = read_trainer(data)
        chunk = frame.message.gradients
        assert (chunk.epoch, chunk.step, chunk.bucket) == (2, 7, 3)
        assert frame.words is not None
        assert frame.words.ctypes.data % 16 == 0
        back[chunk.start - 32 : chunk.start - 32 + frame.words.size] = frame.words
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", ["parameters", "gradients"])
@pytest.mark.parametrize("field", ["epoch", "step", "bucket", "first"])
def test_every_number_comes_back_whole(name: str, field: str) -> None:
    most = U32 if field in ("epoch", "bucket") else U64
    numbers = {"epoch": 0, "step": 0, "bucket": 0, "first": 0, field: most}
    (message,) = frames(TrainerMessage, name, values(1), **numbers)
    frame = read_trainer(to_bytes(message))
    assert frame.message.WhichOneof("kind") == name
    chunk = getattr(frame.message, name)
    assert {"epoch": chunk.epoch, "step": chunk.step, "bucket": chunk.bucket, "first": chunk.start} == numbers


def test_words_are_not_copied_on_arrival() -> None:
    (message,) = frames(ServerMessage, "parameters", values(5000), first=0, epoch=0, step=1)
    data = to_bytes(message)
    frame = read_server(data)
    assert frame.words is not None
    assert np.shares_memory(frame.words, np.frombuffer(data, np.uint8))
    assert not frame.message.parameters.data


def test_chunks_follow_one_another_in_ascending_order() -> None:
    found = frames(ServerMessage, "parameters", values(2 * PER_CHUNK + 1), first=100, epoch=0, step=0)
    chunks = [read_server(to_bytes(message)).message.parameters for message in found]
    assert [chunk.start for chunk in chunks] == [100, 100 + PER_CHUNK, 100 + 2 * PER_CHUNK]
    assert {chunk.bucket for chunk in chunks} == {0}  # parameters are of none


def test_words_are_read_only_when_sent() -> None:
    array = values(PER_CHUNK + 1000)
    pieces = frames(TrainerMessage, "gradients", array, first=0, epoch=0, step=0)
    next(pieces)
    last = next(pieces)
    array[-1] = 42.0
    words = read_trainer(to_bytes(last)).words
    assert words is not None
    assert words[-1] == 42.0


def test_chunks_are_little_endian_float32() -> None:
    (message,) = frames(TrainerMessage, "gradients", np.array([1.0, -2.5], ">f4"), first=0, epoch=0, step=0)
    assert to_bytes(message).endswith(bytes.fromhex("0000803f000020c0"))


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


WHOLE = to_bytes(next(frames(TrainerMessage, "gradients", values(5), first=16, epoch=1, step=2)))


@pytest.mark.parametrize("size", [51, 34, 32, 1], ids=["a part of a word", "that only", "no words", "no header"])
def test_what_cannot_be_words_with_a_header_is_refused(size: int) -> None:
    with pytest.raises(DecodeError, match=f"^{size} bytes are no words with a header$"):
        read_trainer(WHOLE[:size])


@pytest.mark.parametrize("field", [7, 255, 4], ids=["hello", "no such kind", "commit"])
def test_words_of_a_message_that_has_none_are_refused(field: int) -> None:
    with pytest.raises(DecodeError, match=f"^no words have the number {field}$"):
        read_trainer(bytes([0, field]) + WHOLE[2:])


@given(st.binary(max_size=60), st.integers(0, 2000), st.integers(0, 40))
def test_anything_is_read_or_refused(noise: bytes, size: int, at: int) -> None:
    """A message with bytes put in, cut off, or replaced by noise. What begins as protobuf is read as protobuf does."""
    whole = to_bytes(next(frames(TrainerMessage, "gradients", values(1 + size), first=16, epoch=1, step=2)))
    for data in (whole[:at] + noise + whole[at:], whole[: len(whole) - at], noise, noise + bytes(2000)):
        try:
            frame = read_trainer(data)
        except DecodeError:
            if data and data[0]:
                with pytest.raises(DecodeError):
                    TrainerMessage.FromString(data)
            continue
        if frame.words is None:
            assert frame.message == TrainerMessage.FromString(data)
        else:
            assert frame.words.tobytes() == data[32:]
