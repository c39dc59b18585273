"""What all members of a group do together, against NumPy: every call, dtype, op and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from common.paddle_api.communication.reduce_op import ReduceOp
from tests.support.groups import assert_same_bits, cuts_of, reduced
from tests.support.thread_messenger import communicating

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0), (1,), (17,), (5, 7)]
RANKS = (1, 2, 3, 4)
OPS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PROD: np.multiply,
    ReduceOp.AVG: np.add,
}


def sample(rank: int, shape: Sequence[int], dtype: str, seed: int = 0) -> np.ndarray:
    """Values that differ by rank and element; of bfloat16 in float32, exactly."""
    rng = np.random.default_rng([seed, rank])
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "bfloat16":
        wide = (rng.standard_normal(shape) * 8).astype(np.float32)
        return np.asarray((wide.view(np.uint32) & 0xFFFF0000).view(np.float32))
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray(rng.integers(limits.min, limits.max, shape, dtype, endpoint=True))
    values = rng.standard_normal(shape) * 4
    return np.asarray(values + 1j * rng.standard_normal(shape) if "complex" in dtype else values).astype(dtype)


def tensor(rank: int, shape: Sequence[int], dtype: str, seed: int = 0) -> Any:
    return paddle.to_tensor(sample(rank, shape, dtype, seed), dtype=dtype)


def values(t: Any) -> np.ndarray:
    array = t.astype("float32").numpy() if t.dtype == paddle.bfloat16 else t.numpy()
    assert list(array.shape) == list(t.shape)
    return np.asarray(array)


def in_order(inputs: Sequence[np.ndarray], op: int, dtype: str) -> np.ndarray:
    """By hand: chunk c of the flattened array from rank c+1 on, round to rank c."""
    nranks, shape = len(inputs), inputs[0].shape
    wide = np.float32 if dtype in ("float16", "bfloat16") else inputs[0].dtype
    flat = [x.reshape(-1).astype(wide) for x in inputs]
    out, cuts = np.empty(flat[0].size, wide), cuts_of(flat[0].size, nranks)
    for c in range(nranks):
        part = slice(cuts[c], cuts[c + 1])
        total = flat[(c + 1) % nranks][part]
        for i in range(2, nranks + 1):
            total = OPS[op](total, flat[(c + i) % nranks][part])
        if op == ReduceOp.AVG and total.dtype.kind in "iu":
            total = np.array([int(abs(int(x)) // nranks) * (-1 if x < 0 else 1) for x in total], total.dtype)
        elif op == ReduceOp.AVG and nranks > 1:
            total = total * total.real.dtype.type(1 / nranks)
        out[part] = total
    if dtype == "bfloat16":
        return values(paddle.to_tensor(out).astype("bfloat16")).reshape(shape)
    return out.astype(inputs[0].dtype).reshape(shape)


def is_defined(op: int, dtype: str) -> bool:
    if op == ReduceOp.AVG:
        return dtype != "bool"
    return op in (ReduceOp.SUM, ReduceOp.PROD) or "complex" not in dtype


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_reductions(dtype: str, nranks: int) -> None:
    """all_reduce, reduce and reduce_scatter of every op and shape; in the canonical order, bit for bit."""
    cases = [(op, shape) for op in OPS if is_defined(op, dtype) for shape in SHAPES]

    def body(dist: Any) -> list[Any]:
        rank, found = dist.get_group(0).ranks.index(dist.get_group(0).rank), []
        for op, shape in cases:
            everywhere, at_last, part = (tensor(rank, shape, dtype) for _ in range(3))
            assert dist.all_reduce(everywhere, op).wait()
            dist.reduce(at_last, nranks - 1, op)
            dist.reduce_scatter(part, [tensor(rank, shape, dtype, i) for i in range(nranks)], op)
            found.append([values(t) for t in (everywhere, at_last, part)])
        return found

    for rank, found in enumerate(communicating(nranks, body)):
        for (op, shape), (everywhere, at_last, part) in zip(cases, found, strict=True):
            inputs = [sample(r, shape, dtype) for r in range(nranks)]
            right = in_order(inputs, op, dtype)
            assert_same_bits(everywhere, right)
            assert_same_bits(at_last, right if rank == nranks - 1 else inputs[rank])
            whole = [
                np.concatenate([sample(r, shape, dtype, i).reshape(-1) for i in range(nranks)]) for r in range(nranks)
            ]
            size = inputs[0].size
            assert_same_bits(part, in_order(whole, op, dtype)[rank * size : (rank + 1) * size].reshape(shape))


def test_the_order_is_that_of_gradients() -> None:
    """And large arrays, whose sum is that of the compiled loops, in the world and in a group of some."""

    def body(dist: Any) -> list[np.ndarray]:
        rank, some = dist.get_group(0).rank, dist.new_group([2, 0, 1])
        one, other = tensor(rank, (40_001,), "float32"), tensor(rank, (40_001,), "float32")
        dist.all_reduce(one, ReduceOp.AVG)
        if rank < 3:
            dist.all_reduce(other, ReduceOp.SUM, group=some)
        return [values(one), values(other)]

    inputs = [sample(rank, (40_001,), "float32") for rank in range(4)]
    for rank, (mean, total) in enumerate(communicating(4, body)):
        assert_same_bits(mean, reduced(inputs, "mean"))
        assert_same_bits(total, reduced(inputs[:3], "sum") if rank < 3 else inputs[3])


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_what_only_moves(dtype: str, nranks: int) -> None:
    """all_gather, gather, scatter, broadcast, alltoall: all shapes."""

    def body(dist: Any) -> list[Any]:
        rank, found = dist.get_group(0).rank, []
        for shape in SHAPES:
            last, mine = nranks - 1, tensor(rank, shape, dtype)
            gathered: list[Any] = []
            dist.all_gather(gathered, mine)
            at_last: list[Any] = []
            dist.gather(mine, at_last if rank == last else None, dst=last)
            part = paddle.zeros(list(shape), dtype)
            dist.scatter(part, [tensor(9, shape, dtype, i) for i in range(nranks)] if rank == last else None, src=last)
            copy = tensor(rank, shape, dtype)
            dist.broadcast(copy, src=last)
            exchanged: list[Any] = []
            dist.alltoall(exchanged, [tensor(rank, shape, dtype, i) for i in range(nranks)])
            found.append([[values(t) for t in ts] for ts in (gathered, at_last, [part], [copy], exchanged)])
        return found

    for rank, found in enumerate(communicating(nranks, body)):
        for shape, (gathered, at_last, part, copy, exchanged) in zip(SHAPES, found, strict=True):
            everyone = [sample(r, shape, dtype) for r in range(nranks)]
            expected = [
                everyone,
                everyone if rank == nranks - 1 else [],
                [sample(9, shape, dtype, rank)],
                everyone[-1:],
            ]
            expected.append([sample(r, shape, dtype, rank) for r in range(nranks)])
            for got, right in zip((gathered, at_last, part, copy, exchanged), expected, strict=True):
                assert len(got) == len(right)
                for one, other in zip(got, right, strict=True):
                    assert_same_bits(one, other)


def test_alltoall_single_with_unequal_parts() -> None:
    """Rank r sends i+r rows to rank i, perhaps none."""
    nranks = 3

    def body(dist: Any) -> np.ndarray:
        rank = dist.get_group(0).rank
        sent, taken = [i + rank for i in range(nranks)], [rank + r for r in range(nranks)]
        out = paddle.zeros([sum(taken), 2])
        task = dist.alltoall_single(out, tensor(rank, (sum(sent), 2), "float32"), sent, taken, sync_op=False)
        assert (task.wait(), task.is_completed()) == (True, True)
        return values(out)

    inputs = [sample(r, (3 * r + 3, 2), "float32") for r in range(nranks)]
    for rank, out in enumerate(communicating(nranks, body)):
        starts = [sum(i + r for i in range(rank)) for r in range(nranks)]
        assert_same_bits(
            out, np.concatenate([x[s : s + rank + r] for r, (x, s) in enumerate(zip(inputs, starts, strict=True))])
        )


def test_stream_takes_one_tensor_for_all_parts() -> None:
    def body(dist: Any) -> list[np.ndarray]:
        rank, stream = dist.get_group(0).rank, dist.stream
        stacked, exchanged, part, mine = paddle.zeros([3, 4]), paddle.zeros([6]), paddle.zeros([2]), paddle.zeros([2])
        stream.all_gather(stacked, tensor(rank, (4,), "float32"))
        stream.alltoall(exchanged, tensor(rank, (6,), "float32"), use_calc_stream=True)
        stream.reduce_scatter(part, tensor(rank, (6,), "float32"), ReduceOp.MAX)
        stream.scatter(mine, tensor(0, (6,), "float32") if rank == 0 else None, src=0)
        total = tensor(rank, (3,), "float32")
        stream.all_reduce(total, sync_op=False).wait()
        return [values(t) for t in (stacked, exchanged, part, mine, total)]

    six = [sample(r, (6,), "float32") for r in range(3)]
    for rank, (stacked, exchanged, part, mine, total) in enumerate(communicating(3, body)):
        own = slice(2 * rank, 2 * rank + 2)
        assert_same_bits(stacked, np.stack([sample(r, (4,), "float32") for r in range(3)]))
        assert_same_bits(exchanged, np.concatenate([x[own] for x in six]))
        assert_same_bits(part, np.maximum.reduce([x[own] for x in six]))
        assert_same_bits(mine, six[0][own])
        assert_same_bits(total, reduced([sample(r, (3,), "float32") for r in range(3)], "sum"))


@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16"])
def test_views_that_are_not_contiguous_are_changed_where_they_are(dtype: str) -> None:
    def body(dist: Any) -> list[np.ndarray]:
        rank = dist.get_group(0).rank
        base, other = tensor(rank, (4, 5), dtype), tensor(rank, (4, 5), dtype)
        view = base[:, 1:3]
        assert not view.is_contiguous()
        dist.all_reduce(view, ReduceOp.MAX)
        dist.broadcast(other.t(), src=1)
        return [values(base), values(other), values(view)]

    inputs = [sample(r, (4, 5), dtype) for r in range(2)]
    for rank, (base, other, view) in enumerate(communicating(2, body)):
        right = inputs[rank].copy()
        right[:, 1:3] = np.maximum(*inputs)[:, 1:3]
        assert_same_bits(base, right)
        assert_same_bits(view, np.ascontiguousarray(right[:, 1:3]))
        assert_same_bits(other, inputs[1])


def test_outputs_that_are_given_are_filled() -> None:
    def body(dist: Any) -> bool:
        rank = dist.get_group(0).rank
        outputs = [paddle.zeros([3]) for _ in range(2)]
        before = list(outputs)
        dist.all_gather(outputs, tensor(rank, (3,), "float32"))
        for r in range(2):
            assert outputs[r] is before[r]
            assert_same_bits(values(outputs[r]), sample(r, (3,), "float32"))
        return True

    assert communicating(2, body) == [True, True]


def test_large_arrays_travel_apart_from_their_header() -> None:
    def body(dist: Any) -> list[np.ndarray]:
        rank = dist.get_group(0).rank
        copy, least = tensor(rank, (70_001,), "float32"), tensor(rank, (70_001,), "int8")
        dist.broadcast(copy, 1)
        dist.all_reduce(least, ReduceOp.MIN)
        return [values(copy), values(least)]

    for copy, least in communicating(2, body):
        assert_same_bits(copy, sample(1, (70_001,), "float32"))
        assert_same_bits(least, np.minimum(*(sample(r, (70_001,), "int8") for r in range(2))))
