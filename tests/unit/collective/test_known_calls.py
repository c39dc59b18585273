"""Short all-reduces of a kind that there was before: one call, with the same bits and the same errors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from common.errors import PeerLost, ProtocolError, StaleEpoch
from common.kernels.layout import PLANS, slot_of
from tests.support.groups import DEADLINE_S, assert_same_bits, errors_on, on_ranks, opened, reduced, sample

KINDS = [("sum", "float32", 1000), ("mean", "float32", 1000), ("max", "int64", 1000), ("sum", "float64", (7, 9))]
LAYOUTS = {
    "not contiguous": lambda values: np.repeat(values, 2)[::2],
    "not aligned": lambda values: np.frombuffer(bytearray(b"." + values.tobytes()), np.uint8)[1:].view(values.dtype),
    "a subclass": lambda values: values.view(np.memmap),
    "another dtype of that size": lambda values: values.astype(np.int32),
}


def call_once(groups, kinds):
    """From then on these are known, and anything that goes the long way fails."""

    def body(group):
        for op, dtype, shape in kinds:
            group.all_reduce(np.zeros(shape, dtype), op)

    def refuse(*_):
        raise AssertionError("not by one call")

    on_ranks(groups, body)
    for group in groups:
        group._algorithm.all_reduce = refuse


@pytest.mark.parametrize("nranks", [2, 3])
def test_what_came_once_is_one_call_from_then_on(nranks):
    def body(group):
        arrays = [sample(group.rank, shape, dtype) for _, dtype, shape in KINDS]
        for array, (op, _, _) in zip(arrays, KINDS, strict=True):
            group.all_reduce(array, op)
            group.all_reduce(array, op, step=(1 << 64) - 2, bucket=7)
        return arrays, group._calls, group.step

    with opened("shm", nranks) as groups:
        call_once(groups, KINDS)
        told = on_ranks(groups, body)
    for number, (op, dtype, shape) in enumerate(KINDS):
        once = reduced([sample(rank, shape, dtype) for rank in range(nranks)], op)
        for arrays, calls, step in told:
            assert_same_bits(arrays[number], reduced([once] * nranks, op))
            assert (calls, step) == (3 * len(KINDS), (1 << 64) - 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_like_that_has_the_same_sum(layout):
    def body(group):
        array = LAYOUTS[layout](np.arange(1000, dtype=np.float32) + group.rank)
        group.all_reduce(array, "sum")
        return array

    with opened("shm", 2) as groups:
        on_ranks(groups, lambda group: group.all_reduce(np.zeros(1000, np.float32), "sum"))
        for found in on_ranks(groups, body):
            assert_same_bits(np.asarray(found), (2 * np.arange(1000) + 1).astype(found.dtype))


def test_kinds_that_share_a_slot_take_turns():
    sizes = (1, 64)
    assert len({slot_of(id("sum"), id(np.dtype(np.float32)), size) for size in sizes}) == 1

    def body(group):
        sums = []
        for size in sizes * 3:
            array = np.full(size, 1 + group.rank, np.float32)
            group.all_reduce(array, "sum")
            sums.append(float(array.sum()))
        return sums

    with opened("shm", 2) as groups:
        assert on_ranks(groups, body) == [[3.0, 192.0] * 3] * 2


def test_an_op_that_has_the_slot_of_another_is_not_taken_for_it():
    def body(group):
        known = group._algorithm._short.known
        (call,) = known._calls.values()
        slot = PLANS + slot_of(id("max"), id(call.dtype), 1000)
        known._table[slot : slot + 2] = id("sum"), call.plan
        array = np.full(1000, 1 + group.rank, np.float32)
        group.all_reduce(array, "max")
        return float(array[-1])

    with opened("shm", 2) as groups:
        on_ranks(groups, lambda group: group.all_reduce(np.zeros(1000, np.float32), "sum"))
        assert on_ranks(groups, body) == [2.0, 2.0]


def test_what_cannot_be_reduced_is_refused_as_ever():
    fixed = np.zeros(1000, np.float32)
    fixed.flags.writeable = False
    wrong = [
        (([0.0] * 1000, "sum"), {}, TypeError, r"array must be a numpy.ndarray \(got list\)"),
        ((fixed, "sum"), {}, ValueError, "array must be writable"),
        ((np.zeros(1000, np.float32), "min"), {}, ValueError, "op must be one of sum, mean, max"),
        ((np.zeros(1000, np.float32), "sum"), {"step": -1}, ValueError, r"step must be in 0\.\.2\^64-1"),
        ((np.zeros(1000, np.float32), "sum"), {"step": 1 << 64}, ValueError, r"step must be in 0\.\.2\^64-1"),
        ((np.zeros(1000, np.float32), "sum"), {"bucket": 1 << 32}, ValueError, "bucket in 0"),
        ((np.zeros(1000, np.float32), "sum"), {"bucket": -1}, ValueError, "bucket in 0"),
    ]
    with opened("shm", 2) as groups:
        call_once(groups, KINDS[:1])
        for arguments, label, kind, text in wrong:
            with pytest.raises(kind, match=text):
                groups[0].all_reduce(*arguments, **label)
        on_ranks(groups, lambda group: group.all_reduce(np.zeros(1000, np.float32), "sum"))  # and is still usable


@pytest.mark.parametrize(
    ("differing", "kind", "text"),
    [
        ("step", ProtocolError, "rank 1 called all_reduce (sum of float32) of step 6, bucket 0, this rank all_reduce"),
        ("size", ProtocolError, "rank 1 has 36 bytes where this rank has 4000"),
        ("epoch", StaleEpoch, "rank 1 sent a message of epoch 4, this is epoch 0"),
    ],
)
def test_ranks_that_differ_are_told_so(differing, kind, text):
    def body(group):
        size = 9 if differing == "size" and group.rank else 1000
        group.all_reduce(np.zeros(size, np.float32), "sum", step=5 + (differing == "step") * group.rank)

    with opened("shm", 2) as groups:
        call_once(groups, [("sum", "float32", 1000), ("sum", "float32", 9)])
        groups[1].epoch = 4 * (differing == "epoch")
        errors = errors_on(groups, body)
    assert {type(error) for error in errors} <= {kind, PeerLost}  # whoever looks last may find the other gone
    assert any(str(error).startswith(text) for error in errors)


def test_a_rank_that_comes_late_is_waited_for_while_other_threads_go_on():
    waits = threading.Event()

    def body(group):
        if group.rank:
            assert waits.wait(DEADLINE_S)
        else:
            group.messenger._mesh.alarming = telling(group.messenger._mesh.alarming)
        array = np.full(1000, 1 + group.rank, np.float32)
        group.all_reduce(array, "sum")
        return float(array[-1])

    def telling(alarming):
        def tell(post):
            waits.set()
            return alarming(post)

        return tell

    with opened("shm", 2) as groups:
        call_once(groups, KINDS[:1])
        assert on_ranks(groups, body) == [3.0, 3.0]


def test_a_rank_that_left_is_named():
    with opened("shm", 2) as groups:
        call_once(groups, KINDS[:1])
        groups[1].close("boom")
        with pytest.raises(PeerLost, match="rank 1 left with boom"):
            groups[0].all_reduce(np.zeros(1000, np.float32), "sum")
