"""What goes over the wire comes back equal, and what cannot be right is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ProtocolError, UsageError
from common.network.gradsync_pb2 import Chunk, Configure, Register, ServerMessage, StatePiece
from common.network.rpc import CHUNK_BYTES, OPTIONS
from common.tensors.arena import Arena, FloatArray, Layout
from common.tensors.buckets import plan_buckets
from common.tensors.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, Optimizer, RMSProp
from common.tensors.parts import Accumulator
from ps.planes.protobuf_messages import (
    data_of,
    describe,
    layout_of,
    optimizer_message,
    optimizer_of,
    state_of,
    state_pieces,
)

PER_CHUNK = 262_144  # elements: 1 MiB of float32
U32, U64 = (1 << 32) - 1, (1 << 64) - 1


def values(size: int) -> FloatArray:
    return np.random.default_rng(size).standard_normal(size).astype(np.float32)


@given(st.binary(max_size=40))
def test_only_whole_elements_are_taken(data: bytes) -> None:
    chunk = Chunk(step=5, data=data)
    if len(data) % 4 == 0:
        assert data_of(chunk).tobytes() == data
        return
    with pytest.raises(ProtocolError, match=rf"{len(data)} bytes at step 5"):
        data_of(chunk)


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


def test_a_layout_of_two_dtypes_comes_back() -> None:
    layout = Layout.of([("a", (3, 5))]).then([("b", (7,)), ("scalar", ())], "float64")
    arena = Arena(layout, buckets=layout.plan(first_bytes=64, bucket_bytes=64))
    assert {bucket.dtype for bucket in arena.buckets} == {"float32", "float64"}
    message = describe(arena, None, rank=0, epoch=0)
    assert layout_of(Register.FromString(message.SerializeToString())) == (layout, arena.buckets)


@pytest.mark.parametrize("where", ["slots", "buckets"])
def test_another_dtype_in_a_layout_is_refused(where: str) -> None:
    message = describe(Arena(Layout.of([("w", (1,))])), None, rank=3, epoch=0)
    getattr(message, where)[0].dtype = "float16"
    with pytest.raises(ProtocolError, match=r"^rank 3 registered dtype 'float16', not one of float32, float64$"):
        layout_of(message)


def test_the_optimizer_of_a_configuration_comes_back() -> None:
    optimizer = RMSProp(rho=0.9, momentum=0.5, centered=True)
    message = Configure(optimizer=optimizer_message(optimizer), names=["a"])
    assert optimizer_of(Configure.FromString(message.SerializeToString())) == optimizer
    assert optimizer_of(Configure(names=["a"])) is None


# ---- optimizer state --------------------------------------------------------------------------------------------

AROUND_A_MESSAGE = [n + d for n in (PER_CHUNK // 2, PER_CHUNK, 2 * PER_CHUNK) for d in (-1, 0, 1)]


@st.composite
def accumulators(draw: st.DrawFn, number: int) -> Accumulator:
    dtype = draw(st.sampled_from(["float32", "float64"]))
    count = draw(st.one_of(st.just(1), st.integers(1, 2000), st.sampled_from(AROUND_A_MESSAGE)))
    first, rest = draw(st.integers(0, 10**12)), draw(st.integers(0, 10**12))
    bits = np.random.default_rng(count).bytes(count * np.dtype(dtype).itemsize)  # also such as are no numbers
    return Accumulator(f"p{number}_moment", number, first + count + rest, first, np.frombuffer(bits, dtype))


states = st.integers(0, 3).flatmap(lambda n: st.tuples(*(accumulators(number) for number in range(n))))


def over_the_wire(state: list[Accumulator]) -> list[StatePiece]:
    sent = [ServerMessage(state=piece) for piece in state_pieces(state, epoch=U32)]
    assert all(message.ByteSize() < dict(OPTIONS)["grpc.max_send_message_length"] for message in sent)
    return [ServerMessage.FromString(message.SerializeToString()).state for message in sent]


@settings(max_examples=30)
@given(states)
def test_a_state_comes_back_from_its_pieces(state: tuple[Accumulator, ...]) -> None:
    received = over_the_wire(list(state))
    assert [piece.last for piece in received] == [False] * (len(received) - 1) + [True]
    assert {piece.epoch for piece in received} == {U32}
    assert len(received) - 1 == sum(-(-each.values.nbytes // CHUNK_BYTES) for each in state)
    found = state_of(received)
    assert len(found) == len(state)
    for mine, theirs in zip(found, state, strict=True):
        assert (mine.key, mine.slot, mine.size, mine.first) == (theirs.key, theirs.slot, theirs.size, theirs.first)
        assert mine.values.dtype == theirs.values.dtype
        assert mine.values.tobytes() == theirs.values.tobytes()


@pytest.mark.parametrize("order", [[0, 2], [1, 2], [0, 0, 1, 2], [1, 0, 2]])
def test_a_state_of_which_a_piece_is_missing_or_comes_twice_is_refused(order: list[int]) -> None:
    pieces = list(state_pieces([Accumulator(key, 0, 1, 0, np.ones(1, np.float32)) for key in ("a", "b")], epoch=1))
    with pytest.raises(ProtocolError, match=r"^piece \d of an optimizer state came where piece \d was expected$"):
        state_of([pieces[number] for number in order])


def test_an_empty_state_is_one_message() -> None:
    (piece,) = over_the_wire([])
    assert piece.last
    assert state_of([piece]) == []


def test_pieces_of_a_state_tell_where_they_begin() -> None:
    each = Accumulator("w_moment1_0", 2, 10**6, 7, np.zeros(PER_CHUNK + 1))  # float64: two messages and a bit
    firsts = [(piece.first, piece.size, piece.slot, piece.dtype) for piece in state_pieces([each], epoch=0)]
    half = PER_CHUNK // 2
    assert firsts[:3] == [(7 + start, 10**6, 2, "float64") for start in (0, half, 2 * half)]


def test_a_state_of_another_dtype_is_refused() -> None:
    piece = StatePiece(key="w_moment1_0", dtype="int32", size=1, data=bytes(4))
    with pytest.raises(ProtocolError, match=r"^optimizer state w_moment1_0 is 'int32', not one of float32, float64$"):
        state_of([piece])


@pytest.mark.parametrize(("dtype", "size"), [("float32", 3), ("float64", 4)])
def test_a_state_of_a_broken_number_is_refused(dtype: str, size: int) -> None:
    piece = StatePiece(key="w_moment1_0", dtype=dtype, size=1, data=bytes(size))
    with pytest.raises(ProtocolError, match=f"^optimizer state w_moment1_0 has {size} bytes, not whole {dtype} data$"):
        state_of([piece])
