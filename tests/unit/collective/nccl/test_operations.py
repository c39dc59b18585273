"""NCCL's own operations and our ring over it; whose arrays are reduced where."""

from __future__ import annotations

import numpy as np
import pytest

from common.tensors.reduction import DTYPES, OPS
from tests.support.fake_nccl import FakeArray, FakeNccl, on_gpu
from tests.support.groups import assert_same_bits, cuts_of, nccl_groups, on_ranks, reduced, sample
from tests.support.nccl_cases import bindings, kinds

CASES = [(dtype, op) for dtype in DTYPES for op in OPS if op != "mean" or dtype.startswith("float")]
SIZES = (0, 1, 15, 17, 96, 1009, 48_000)  # 96 and 48,000 give 2, 3 and 4 ranks chunks of one length


def closed_after(groups, body):
    try:
        return on_ranks(groups, body)
    finally:
        for group in groups:
            group.close()


# NCCL's own operations


def bound(inputs, op):
    """Every order of summation is within this of every other: N-1 roundings of at most the sum of magnitudes."""
    if op == "max" or inputs[0].dtype.kind == "i":
        return 0
    kind = np.float32 if inputs[0].dtype == np.float16 else inputs[0].dtype
    each = np.finfo(kind).eps * len(inputs) * sum(np.abs(x.astype("f8")) for x in inputs)
    rounded_once = (
        np.finfo(np.float16).eps * sum(np.abs(x.astype("f8")) for x in inputs) if kind != inputs[0].dtype else 0
    )
    return each + rounded_once


@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_nccl_is_within_the_bound_of_the_canonical_order(nranks, dtype, op):
    def body(group):
        found = []
        for size in SIZES:
            whole, parts = on_gpu(sample(group.rank, size, dtype)), on_gpu(sample(group.rank, size, dtype))
            group.all_reduce(whole, op)
            chunk = group.reduce_scatter(parts, op)
            assert type(chunk) is FakeArray
            parts = on_gpu(sample(group.rank, size, dtype))
            group.gather_chunks(parts)
            found.append((np.asarray(whole), np.asarray(chunk).copy(), np.asarray(parts)))
        return found

    for rank, found in enumerate(closed_after(nccl_groups(nranks, ring=False), body)):
        for size, (whole, chunk, parts) in zip(SIZES, found, strict=True):
            inputs = [sample(r, size, dtype) for r in range(nranks)]
            expected = reduced(inputs, op) if nranks > 1 else inputs[0]
            cuts, limit = cuts_of(size, nranks), np.broadcast_to(bound(inputs, op), size)
            mine = slice(cuts[rank], cuts[rank + 1])
            assert (np.abs(whole.astype("f8") - expected.astype("f8")) <= limit).all()
            assert (np.abs(chunk.astype("f8") - expected[mine].astype("f8")) <= limit[mine]).all()
            assert_same_bits(parts, np.concatenate([inputs[c][cuts[c] : cuts[c + 1]] for c in range(nranks)]))


def test_which_functions_of_nccl_are_used():
    calls = {}

    def body(group):
        group.all_reduce(on_gpu(np.ones(96, "f4")))
        group.reduce_scatter(on_gpu(np.ones(96, "f4")))
        group.gather_chunks(on_gpu(np.ones(96, "f4")))
        group.broadcast(on_gpu(np.ones(96, "f4")))

    for ring in (False, True):
        fake = FakeNccl()
        closed_after(nccl_groups(2, ring=ring, nccl=fake), body)
        calls[ring] = set(fake.calls)
    assert calls[False] == {"AllReduce", "ReduceScatter", "AllGather", "Broadcast"}
    assert calls[True] == {"Send", "Recv", "Broadcast"}


@kinds
def test_a_nan_on_any_rank_is_the_maximum(ring):
    def body(group):
        array = on_gpu(np.array([1.0, 2.0, -3.0], "f4"))
        if group.rank == 1:
            array[1] = np.nan
        group.all_reduce(array, "max")
        return array

    for found in closed_after(nccl_groups(3, ring=ring), body):
        np.testing.assert_array_equal(found, [1.0, np.nan, -3.0])


@bindings
@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_our_ring_over_nccl_gives_the_canonical_bits(binding, nranks, dtype, op):
    def body(group):
        found = []
        for size in SIZES:
            array = on_gpu(sample(group.rank, size, dtype))
            group.all_reduce(array, op)
            found.append(np.asarray(array))
        return found

    for found in closed_after(nccl_groups(nranks, ring=True, binding=binding), body):
        for size, result in zip(SIZES, found, strict=True):
            inputs = [sample(r, size, dtype) for r in range(nranks)]
            assert_same_bits(result, reduced(inputs, op) if nranks > 1 else inputs[0])


# Whose arrays


class Tensor:
    """Of another library, on some device of DLPack's."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


@kinds
@pytest.mark.parametrize("layout", ["contiguous", "every other", "transposed"])
@pytest.mark.parametrize("place", ["host", "gpu"])
def test_arrays_of_any_layout_here_and_there(ring, layout, place):
    shapes = {"contiguous": lambda a: a, "every other": lambda a: a[::2, ::3], "transposed": lambda a: a.T}

    def body(group):
        base = np.zeros((40, 30), "f4")
        array = shapes[layout](on_gpu(base) if place == "gpu" else base)
        array[...] = sample(group.rank, array.shape, "float32")
        group.all_reduce(array, "sum")
        rows = group.all_gather(array)
        assert type(rows) is type(array)
        group.broadcast(array, root=1)
        return np.asarray(array).copy(), np.asarray(rows)

    shape = shapes[layout](np.zeros((40, 30))).shape
    expected = reduced([sample(rank, shape, "float32") for rank in range(2)], "sum")
    for array, rows in closed_after(nccl_groups(2, ring=ring), body):
        np.testing.assert_array_equal(array, expected)  # of 2 numbers every order of summation is the same
        np.testing.assert_array_equal(rows, np.stack([expected] * 2))


def test_another_librarys_tensor_is_reduced_in_its_own_memory():
    def body(group):
        array = np.full(10, group.rank + 1.0, "f4")
        group.all_reduce(Tensor(array), "sum")
        return array

    for found in closed_after(nccl_groups(2, ring=False), body):
        np.testing.assert_array_equal(found, np.full(10, 3.0))


@pytest.mark.parametrize(
    ("array", "error", "text"),
    [
        ([1.0], TypeError, r"array must be of NumPy, CuPy or a DLPack producer \(got list\)"),
        (Tensor(np.ones(3), device=(10, 0)), ValueError, "array must lie on GPU 0, as the group does, or on the host"),
        (np.ones(3, "u1"), TypeError, "dtype must be one of float32"),
        (np.broadcast_to(np.float32(1), 4), ValueError, "array must be writable"),
    ],
)
def test_what_is_no_array_is_refused(array, error, text):
    (group,) = nccl_groups(1, ring=False)
    with group, pytest.raises(error, match=text):
        group.all_reduce(array, "sum")


def test_host_arrays_pass_through_pinned_memory_unless_they_lie_there():
    (group,) = nccl_groups(1, ring=False, on_host=True)
    with group:
        gpu = group._algorithm._gpu
        pinned = group.empty(100)
        before = len(gpu._pinned)
        pinned[...] = 2
        group.all_reduce(pinned)
        assert len(gpu._pinned) == before  # straight
        group.all_reduce(array := np.full(100, 3.0, "f4"))
        assert len(gpu._pinned) == before + 1
        group.all_reduce(np.full(50, 3.0, "f4"))
        assert len(gpu._pinned) == before + 1  # used again
        assert array.tolist() == [3.0] * 100


def test_our_stream_follows_the_callers_before_each_operation():
    (group,) = nccl_groups(1, ring=False)
    with group:
        for count in (1, 2):
            group.all_reduce(on_gpu(np.ones(3, "f4")))
            assert group._algorithm._gpu.followed == count
