"""Arguments that are refused, and ranks whose calls differ."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from common.errors import PeerError, PeerLost, ProtocolError, StaleEpoch
from common.tensors.reduction import DTYPES
from tests.support.collectives import backends, filled, ones
from tests.support.groups import BACKENDS, CANONICAL, DEADLINE_S, errors_on, mesh_groups, on_ranks, opened, transport_of
from tests.support.pairwise import combined

SHAPES = ((), 0, 5, (0, 3), (2, 3, 5))


@pytest.mark.parametrize(
    ("array", "op", "error", "text"),
    [
        (np.zeros(4, "f4"), "min", ValueError, "op must be one of sum, mean, max (got 'min')"),
        (np.zeros(4, "u1"), "sum", TypeError, f"dtype must be one of {', '.join(DTYPES)} (got uint8)"),
        (np.zeros(4, "c8"), "sum", TypeError, f"dtype must be one of {', '.join(DTYPES)} (got complex64)"),
        (
            np.zeros(4, ">f4"),
            "sum",
            TypeError,
            f"dtype must be one of {', '.join(DTYPES)} (got >f4, the other byte order)",
        ),
        (np.zeros(4, "i4"), "mean", ValueError, "the mean of integers is not an integer (got int32); use op='sum'"),
        (np.zeros(4, "i8"), "mean", ValueError, "the mean of integers is not an integer (got int64); use op='sum'"),
        (np.broadcast_to(np.float32(1), 4), "sum", ValueError, "array must be writable, for it holds the result"),
        ([1.0], "sum", TypeError, "array must be a numpy.ndarray (got list)"),
    ],
)
@pytest.mark.parametrize("nranks", [1, 2])
@pytest.mark.parametrize("method", ["all_reduce", "reduce_scatter"])
def test_bad_arguments_are_refused_before_anything_is_sent(nranks, method, array, op, error, text):
    group = mesh_groups("memory", nranks)[0]
    with pytest.raises(error) as caught:
        getattr(group, method)(array, op)
    assert str(caught.value) == text
    assert all(edge.messages.empty() for edge in transport_of(group)._edges.values())


@pytest.mark.parametrize("root", [-1, 2])
def test_broadcast_from_no_rank_is_refused(root):
    with pytest.raises(ValueError, match=rf"^root must be a rank, 0\.\.1 \(got {root}\)$"):
        mesh_groups("memory", 2)[0].broadcast(np.zeros(3), root)


@pytest.mark.parametrize("shape", [-1, (2, -3)])
def test_a_negative_shape_is_refused(shape):
    with pytest.raises(ValueError, match="shape must not be negative") as caught:
        mesh_groups("memory", 2)[0].empty(shape)
    assert str(caught.value).endswith(f"(got {shape})")


@pytest.mark.parametrize("label", [{"step": -1}, {"step": 1 << 64}, {"bucket": -1}, {"bucket": 1 << 32}])
def test_labels_that_messages_cannot_carry_are_refused(label):
    with pytest.raises(ValueError, match=r"^step must be in 0\.\.2\^64-1 and bucket in 0\.\.2\^32-1 \(got "):
        mesh_groups("memory", 2)[0].all_reduce(ones(3), **label)


def test_a_second_thread_within_a_call_is_refused():
    refused = threading.Event()

    def body(group):
        if group.rank == 1:
            assert refused.wait(DEADLINE_S)
        else:
            threading.Thread(target=call_beside, args=(group,)).start()
        group.all_reduce(ones(10))

    def call_beside(group):
        while not group._turn.locked():
            time.sleep(0.001)
        try:
            group.barrier()
        except RuntimeError as exc:
            texts.append(str(exc))
        refused.set()

    texts: list[str] = []
    with opened("shm", 2) as every:
        on_ranks(every, body)
    assert texts == [
        "rank 0: two threads call the group at the same time; all ranks must make the same calls in the same order, so "
        "let one thread make them, or give each thread a group of its own"
    ]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_who_calls_something_else_is_named_with_both_calls(backend):
    def body(group):
        group.all_reduce(ones(10_000), "max" if group.rank == 1 else "sum", step=5, bucket=3)

    with opened(backend, 2) as every:
        errors = errors_on(every, body)
    theirs, ours = (f"all_reduce ({op} of float32) of step 5, bucket 3" for op in ("max", "sum"))
    rule = "all ranks must make the same calls in the same order"
    assert f"rank 1 called {theirs}, this rank {ours}; {rule}" in map(str, errors)


@backends
def test_calls_that_do_not_match_are_a_protocol_error(backend):
    """One rank is a call ahead of the others."""

    def body(group):
        if group.rank == 0:
            group.barrier()
        group.all_reduce(np.ones(100, np.float32))

    with opened(backend, 3) as every:
        errors = errors_on(every, body)
    assert all(errors)
    assert any(isinstance(error, ProtocolError) for error in errors)


MISMATCHES = {  # what rank 1 does, where the others all-reduce 10,000 float32
    "size": lambda group: group.all_reduce(ones(10_016)),
    "a short size": lambda group: group.all_reduce(ones(100)),
    "no size": lambda group: group.all_reduce(ones(0)),
    "dtype": lambda group: group.all_reduce(ones(5_000, "float64")),
    "op": lambda group: group.all_reduce(ones(10_000), "max"),
    "step": lambda group: group.all_reduce(ones(10_000), step=7),
    "bucket": lambda group: group.all_reduce(ones(10_000), bucket=7),
    "operation": lambda group: group.reduce_scatter(ones(10_000)),
    "all_gather": lambda group: group.all_gather(ones(10_000)),
    "broadcast": lambda group: group.broadcast(ones(10_000), 1),
    "barrier": lambda group: group.barrier(),
}


SHORT_MISMATCHES = {  # the same of 1,000 float32, which ranks of one host post in one area
    "size": lambda group: group.all_reduce(ones(1_016)),
    "a longer size": lambda group: group.all_reduce(ones(4_000)),
    "a long size": lambda group: group.all_reduce(ones(40_000)),
    "no size": lambda group: group.all_reduce(ones(0)),
    "dtype": lambda group: group.all_reduce(ones(500, "float64")),
    "op": lambda group: group.all_reduce(ones(1_000), "max"),
    "operation": lambda group: group.reduce_scatter(ones(1_000)),
    "broadcast": lambda group: group.broadcast(ones(1_000), 1),
}


@pytest.mark.parametrize("what", SHORT_MISMATCHES)
def test_short_calls_that_differ_are_an_error_on_every_rank(what):
    def body(group):
        if group.rank == 1:
            SHORT_MISMATCHES[what](group)
        else:
            group.all_reduce(ones(1_000))
        group.barrier()

    with opened("shm", 3) as every:
        errors = errors_on(every, body)
    assert all(isinstance(error, (ProtocolError, PeerError)) for error in errors), errors
    assert any(isinstance(error, ProtocolError) for error in errors)


@combined("backend, shared, what", CANONICAL, [False, True], [*MISMATCHES])
def test_calls_that_differ_are_an_error_on_every_rank(backend, shared, what):
    def body(group):
        if group.rank == 1:
            MISMATCHES[what](group)
        else:
            group.all_reduce(filled(group, 10_000, "float32", shared))
        group.barrier()  # the root of a ring's broadcast waits for nobody, and learns it here

    with opened(backend, 3) as every:
        errors = errors_on(every, body)
    assert all(isinstance(error, (ProtocolError, PeerError)) for error in errors), errors
    assert any(isinstance(error, ProtocolError) for error in errors)


def test_who_differs_is_named_with_both_sizes():
    def body(group):
        group.all_reduce(ones(10_000 + 16 * (group.rank == 2)), step=5, bucket=3)

    with opened("shm", 3) as every:
        errors = errors_on(every, body)
    for error in errors:
        assert type(error) in (ProtocolError, PeerLost)  # whoever looks last may find the others gone
    texts = [str(error) for error in errors]
    call = "all_reduce (mean of float32) of step 5, bucket 3"
    advice = "arrays must be of equal size and dtype on all ranks"
    assert f"rank 2 has 40064 bytes where this rank has 40000, in {call}; {advice}" in texts


def test_a_rank_of_another_epoch_is_refused():
    with opened("shm", 2) as every:
        every[1].epoch = 4
        errors = errors_on(every, lambda group: group.all_reduce(ones(100)))
    assert {type(error) for error in errors} <= {StaleEpoch, PeerLost}
    assert any(str(error) == "rank 1 sent a message of epoch 4, this is epoch 0" for error in errors)


@backends
def test_a_rank_that_raises_makes_the_others_fail_with_its_reason(backend):
    def body(group):
        group.barrier()
        if group.rank == 1:
            raise ValueError("boom")
        group.all_reduce(np.ones(1000))

    with opened(backend, 3) as every:
        errors = errors_on(every, body)
    assert type(errors[1]) is ValueError
    for error in (errors[0], errors[2]):
        assert type(error) is PeerLost
        assert "rank 1 left with ValueError: boom" in str(error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_group_says_who_it_is(groups, backend):
    kind, _, algorithm = backend.partition("-")
    algorithm = algorithm or ("ring" if kind == "memory" else "direct")
    names = [(g.rank, g.nranks, g.backend, g.algorithm) for g in groups.of(backend, 3)]
    assert names == [(rank, 3, kind, algorithm) for rank in range(3)]


@combined("backend, shape, dtype", CANONICAL, SHAPES, DTYPES)
def test_empty_has_the_shape_and_dtype_asked_for(groups, backend, shape, dtype):
    array = groups.of(backend, 2)[0].empty(shape, dtype)
    assert (array.shape, array.dtype) == (np.empty(shape).shape, dtype)
    assert array.flags.c_contiguous
