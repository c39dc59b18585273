"""Objects arrive as what they were, without pickle; bytes that are not ours are refused, and cost nothing."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from datetime import datetime, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

pytest.importorskip("paddle")

import paddle

from common.errors import ProtocolError, UsageError
from common.paddle_api.communication.objects import MOST_DEPTH, Codec
from tests.support.thread_messenger import communicating

PLAIN = Codec()

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.decimals(),
    st.datetimes(),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.sampled_from([Path("a/b"), PurePosixPath("/x")]),
)
keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()))
plain = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner),
        st.sets(keys),
        st.frozensets(keys),
        st.dictionaries(keys, inner).map(OrderedDict),
        st.dictionaries(keys, inner).map(partial(defaultdict, list)),
        st.dictionaries(keys, st.integers()).map(Counter),
        st.lists(inner).map(deque),
        st.lists(inner).map(partial(deque, maxlen=2)),
        st.binary().map(bytearray),
    ),
    max_leaves=20,
)
numbers = st.one_of(hnp.scalar_dtypes(), hnp.unicode_string_dtypes(), hnp.byte_string_dtypes())
arrays = numbers.filter(lambda d: d.isnative or d.kind != "M").flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
)


def alike(one: Any, other: Any) -> bool:
    """Equal, of the same types, with NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
        return False
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return all(alike(list(a), list(b)) for a, b in zip(one.items(), other.items(), strict=True))
    if isinstance(one, (float, complex, Decimal)):
        return repr(one) == repr(other)
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, np.generic):
        return (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    return bool(one == other)


@given(plain)
def test_plain_types_and_containers(value: Any) -> None:
    assert alike(PLAIN.decode(PLAIN.encode(value)), value)


@given(arrays)
def test_arrays_and_their_scalars(array: np.ndarray) -> None:
    plain = [] if array.dtype.kind in "mM" else array.reshape(-1)[:1].tolist()  # of dates they are no plain types
    found = PLAIN.decode(PLAIN.encode([array, array.T, plain]))
    assert alike(found[:2], [array, np.array(array.T, order="C")])
    found[0].reshape(-1)[:1] = array.reshape(-1)[:1]  # it may be written to
    if array.size:
        scalar = array.reshape(-1)[0]
        assert alike(PLAIN.decode(PLAIN.encode({"x": scalar})), {"x": scalar})


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("shape", [[], [0, 2], [3], [2, 3]])
def test_tensors(dtype: str, shape: list[int]) -> None:
    tensor = paddle.ones(shape, dtype)
    tensor.stop_gradient = dtype != "float32"
    found = PLAIN.decode(PLAIN.encode((tensor, [tensor.t() if len(shape) == 2 else tensor])))
    assert type(found[0]) is type(tensor)
    assert (found[0].dtype, list(found[0].shape), found[0].stop_gradient) == (tensor.dtype, shape, dtype != "float32")
    assert found[0].numpy().tobytes() == tensor.numpy().tobytes()
    assert list(found[1][0].shape) == shape[::-1]


def test_a_state_dict_arrives_as_one() -> None:
    state = paddle.nn.Linear(2, 3).state_dict()
    found = PLAIN.decode(PLAIN.encode(state))
    assert type(found) is type(state)
    assert [(k, v.numpy().tolist()) for k, v in found.items()] == [(k, v.numpy().tolist()) for k, v in state.items()]


class Mine:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine)

    __hash__ = None  # type: ignore[assignment]


ALMOST = [defaultdict(lambda: 0), datetime.now(timezone.utc), defaultdict(Mine)]


@pytest.mark.parametrize(
    "value", [Mine(), [1, {"a": Mine()}], object, len, np.array([None]), np.zeros(1, "f4,f4"), *ALMOST]
)
def test_other_objects_are_refused_by_type_and_flag(value: Any) -> None:
    with pytest.raises(UsageError, match=r"of type [\w.]+ cannot be sent: .*with --allow-pickle"):
        PLAIN.encode(value)


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UsageError, match="more than 100 containers in one another, or itself"):
        PLAIN.encode(value)
    nested: Any = 1
    for _ in range(MOST_DEPTH):
        nested = (nested,)
    assert PLAIN.decode(PLAIN.encode(nested)) == nested


def message(tree: Any, blobs: bytes = b"") -> bytes:
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return struct.pack("<Q", len(text)) + text + blobs


HOSTILE = {
    "nothing": b"",
    "no text": struct.pack("<Q", 1 << 60),
    "no JSON": message(b"\xff{"),
    "braces": message({"a": 1}),
    "deep JSON": message(b"[" * 100_000),
    "deep": message(b'["l",' * 150 + b"1" + b"]" * 150),
    "no letter": message([]),
    "unknown": message(["x", 1]),
    "list as letter": message([["l"], 1]),
    "blob": message(["b", 1 << 62]),
    "negative blob": message(["b", -1], b"x"),
    "blob of a bool": message(["b", True], b"x"),
    "array too large": message(["a", "<f8", [1 << 40], 8], bytes(8)),
    "array overflows": message(["a", "<f8", [1 << 62, 1 << 62], 8], bytes(8)),
    "array of nothing overflows": message(["a", "<f8", [0, 1 << 62, 1 << 62], 0]),
    "negative shape": message(["a", "<f8", [-1, -1], 8], bytes(8)),
    "object array": message(["a", "|O", [1], 8], bytes(8)),
    "fields": message(["a", "<f4,<f4", [1], 8], bytes(8)),
    "large items": message(["a", "|S999999999", [1], 1], b"x"),
    "many dimensions": message(["a", "|u1", [1] * 65, 1], b"x"),
    "tensor of no type": message(["p", "paddle.float99", [1], 4, True], bytes(4)),
    "large tensor": message(["p", "paddle.float32", [1 << 40], 4, True], bytes(4)),
    "unhashable": message(["s", ["l"]]),
    "half a pair": message(["d", 1]),
    "digits": message(["i", "0x"]),
    "float": message(["r", "1e5"]),
    "complex of text": message(["c", "1", 2.0]),
    "bytes left": message(1, b"x"),
    "pickle": message(["o", 4], b"cos\n"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_bytes_that_are_not_ours_are_refused_and_cost_nothing(case: str) -> None:
    data = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            PLAIN.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000 + 20 * len(data)
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_a_protocol_error(data: bytes) -> None:
    for each in (data, message(data), message(["l", data.decode("latin-1")], data)):
        with suppress(ProtocolError):
            PLAIN.decode(each)


@given(plain, st.data())
def test_a_changed_byte_gives_an_object_or_a_protocol_error(value: Any, data: st.DataObject) -> None:
    encoded = bytearray(PLAIN.encode(value))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        PLAIN.decode(encoded)


class Canary:
    """What unpickling it does is seen."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


def test_nothing_is_unpickled_without_the_flag(tmp_path: Path) -> None:
    canary, pickles = tmp_path / "sung", Codec(pickles=True)
    evil = pickles.encode(["fine", Canary(str(canary))])
    with pytest.raises(ProtocolError, match="sent a pickled object, and this one was started without --allow-pickle"):
        PLAIN.decode(evil)
    for raw in (pickle.dumps(Canary(str(canary))), message(["a", "|O", [1], 8], pickle.dumps(Canary(str(canary))))):
        for codec in (PLAIN, pickles):
            with pytest.raises(ProtocolError):
                codec.decode(raw)
    assert not canary.exists()
    assert pickles.decode(evil)[0] == "fine"
    assert canary.exists()
    assert pickles.decode(pickles.encode([Mine(), 1])) == [Mine(), 1]


def test_the_calls_of_objects() -> None:
    """Of all members, of some, and between two; each rank's objects of another size."""

    def body(dist: Any) -> list[Any]:
        rank, some = dist.get_group().rank, dist.new_group([0, 2])
        everyone: list[Any] = ["kept"]
        dist.all_gather_object(everyone, {"rank": rank, "x": (1,) * rank})
        given = [None] * 2 if rank else [{1, 2}, np.arange(3)]
        dist.broadcast_object_list(given, src=0)
        mine: list[Any] = []
        dist.scatter_object_list(mine, [("for", r) for r in range(3)] if rank == 1 else None, src=1)
        pair: list[Any] = []
        if rank != 1:
            dist.all_gather_object(pair, rank, group=some)
        if rank == 2:
            dist.send_object_list([b"x", None], dst_in_group=0, group=some)
        got: list[Any] = [0, 0]
        if rank == 0:
            dist.recv_object_list(got, src=2, group=some)
        return [everyone, given[0], given[1].tolist(), mine, pair, got]

    for rank, (everyone, first, second, mine, pair, got) in enumerate(communicating(3, body)):
        assert everyone == ["kept", *({"rank": r, "x": (1,) * r} for r in range(3))]
        assert (first, second, mine) == ({1, 2}, [0, 1, 2], [("for", rank)])
        assert pair == ([] if rank == 1 else [0, 2])
        assert got == ([b"x", None] if rank == 0 else [0, 0])


def test_other_objects_are_sent_where_that_was_asked_for() -> None:
    def body(dist: Any) -> list[Any]:
        everyone: list[Any] = []
        dist.all_gather_object(everyone, [Mine(), dist.get_group().rank])
        return everyone

    assert communicating(2, body, pickles=True) == [[[Mine(), 0], [Mine(), 1]]] * 2
    with pytest.raises(UsageError, match="--allow-pickle"):
        communicating(1, body)
