"""What goes over the wire comes back equal, and what cannot be right is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.arena import Arena, FloatArray, Layout
from common.buckets import plan_buckets
from common.errors import ProtocolError, UsageError
from common.gradsync_pb2 import Chunk, Register, TrainerMessage
from common.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, Optimizer, RMSProp
from common.rpc import CHUNK_BYTES, OPTIONS
from ps.wire import chunks, data_of, describe, layout_of, optimizer_of

PER_CHUNK = 262_144  # elements: 1 MiB of float32
U32, U64 = (1 << 32) - 1, (1 << 64) - 1


def values(size: int) -> FloatArray:
    return np.random.default_rng(size).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (0, 0),
        (1, 1),
        (17, 1),
        (PER_CHUNK - 1, 1),
        (PER_CHUNK, 1),
        (PER_CHUNK + 1, 2),
        (3 * PER_CHUNK, 3),
        (3 * PER_CHUNK + 5, 4),
    ],
)
def test_an_array_comes_back_from_its_chunks(size: int, pieces: int) -> None:
    array = values(size)
    sent = list(chunks(array, first=32, epoch=2, step=7, bucket=3))
    received = [Chunk.FromString(chunk.SerializeToString()) for chunk in sent]
    assert len(received) == pieces
    assert {(c.epoch, c.step, c.bucket) for c in received} <= {(2, 7, 3)}
    back = np.full(size, np.nan, np.float32)
    for chunk in received:
        data = data_of(chunk)
        back[chunk.start - 32 : chunk.start - 32 + data.size] = data
    assert back.tobytes() == array.tobytes()


def test_chunks_follow_one_another_in_ascending_order() -> None:
    starts = [chunk.start for chunk in chunks(values(2 * PER_CHUNK + 1), first=100, epoch=0, step=0)]
    assert starts == [100, 100 + PER_CHUNK, 100 + 2 * PER_CHUNK]


def test_chunks_are_made_only_when_drawn() -> None:
    array = values(PER_CHUNK + 1)
    pieces = chunks(array, first=0, epoch=0, step=0)
    next(pieces)
    array[-1] = 42.0
    assert data_of(next(pieces))[0] == 42.0


def test_a_chunk_keeps_what_it_was_made_of() -> None:
    array = values(10)
    expected = array.copy()
    chunk = next(chunks(array, first=0, epoch=0, step=0))
    array.fill(0)
    np.testing.assert_array_equal(data_of(chunk), expected)


def test_chunks_are_little_endian_float32() -> None:
    (chunk,) = chunks(np.array([1.0, -2.5], ">f4"), first=0, epoch=0, step=0)
    assert chunk.data == bytes.fromhex("0000803f000020c0")


def test_special_values_keep_their_bits() -> None:
    bits = np.array([0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x00000001], np.uint32)
    (chunk,) = chunks(bits.view(np.float32), first=0, epoch=0, step=0)
    np.testing.assert_array_equal(data_of(chunk).view(np.uint32), bits)


@given(st.binary(max_size=40))
def test_only_whole_elements_are_taken(data: bytes) -> None:
    chunk = Chunk(step=5, data=data)
    if len(data) % 4 == 0:
        assert data_of(chunk).tobytes() == data
        return
    with pytest.raises(ProtocolError, match=rf"{len(data)} bytes at step 5"):
        data_of(chunk)


def test_the_largest_chunk_message_stays_under_grpcs_limit() -> None:
    assert PER_CHUNK * 4 == CHUNK_BYTES
    chunk = Chunk(epoch=U32, step=U64, bucket=U32, start=U64, data=bytes(CHUNK_BYTES))
    size = TrainerMessage(gradients=chunk).ByteSize()
    limits = dict(OPTIONS)
    assert CHUNK_BYTES < size < limits["grpc.max_send_message_length"]
    assert limits["grpc.max_send_message_length"] == limits["grpc.max_receive_message_length"]


@pytest.mark.parametrize(
    "shapes",
    [
        [],
        [("a", (3, 5))],
        [("scalar", ()), ("empty", (0, 4)), ("w", (7, 9)), ("b", (9,))],
    ],
)
def test_a_layout_comes_back(shapes: list[tuple[str, tuple[int, ...]]]) -> None:
    layout = Layout.of(shapes)
    buckets = plan_buckets([s.start for s in layout.slots], layout.length, first_bytes=64, bucket_bytes=128)
    message = describe(Arena(layout, buckets=buckets), SGD(), rank=3, epoch=4)
    received = Register.FromString(message.SerializeToString())
    assert (received.rank, received.epoch) == (3, 4)
    assert layout_of(received) == (layout, buckets)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(learning_rate=0.1),
        SGD(learning_rate=0.1, weight_decay=1e-4),
        Momentum(learning_rate=1e-3, momentum=0.8, use_nesterov=True),
        Adagrad(epsilon=1e-7),
        RMSProp(rho=0.9, centered=True),
        Adam(learning_rate=3e-4, beta1=0.8, beta2=0.99, epsilon=1e-9),
        AdamW(weight_decay=0.05),
    ],
)
def test_an_optimizer_comes_back(optimizer: Optimizer) -> None:
    message = describe(Arena(Layout.of([("w", (1,))])), optimizer, rank=0, epoch=0)
    assert optimizer_of(Register.FromString(message.SerializeToString())) == optimizer


def test_no_optimizer_comes_back_as_none() -> None:
    message = describe(Arena(Layout.of([("w", (1,))])), None, rank=0, epoch=0)
    assert optimizer_of(Register.FromString(message.SerializeToString())) is None


def test_an_unknown_optimizer_is_refused_with_the_nearest_known_one() -> None:
    message = Register()
    message.optimizer.name = "adamm"
    with pytest.raises(UsageError, match="unknown optimizer 'adamm'; did you mean 'adam'"):
        optimizer_of(message)


def test_an_unknown_setting_is_refused_by_name() -> None:
    message = Register()
    message.optimizer.name = "sgd"
    message.optimizer.settings["momentun"] = 0.5
    with pytest.raises(UsageError, match="unknown setting of sgd 'momentun'"):
        optimizer_of(message)
