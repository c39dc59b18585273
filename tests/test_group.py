"""The collective operations against naive NumPy, bit for bit, over every backend; and what `connect` refuses."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collective
from collective.group import BACKENDS as CONNECT_BACKENDS
from collective.group import OPS
from collective.transport import SEGMENT_BYTES
from common.errors import PeerLost, PeerUnreachable, PortInUse, ProtocolError, RendezvousError, UsageError
from common.launch import abstract_address
from tests.groups import (
    BACKENDS,
    assert_same_bits,
    errors_on,
    mesh_groups,
    on_ranks,
    on_threads,
    open_groups,
    opened,
    outcomes_of,
    reduced,
    sample,
)

NRANKS = (1, 2, 3, 4, 5)
DTYPES = ("float32", "float64", "int32", "int64")
CASES = [(dtype, op) for dtype in DTYPES for op in OPS if op == "sum" or dtype.startswith("float")]
SEGMENT = SEGMENT_BYTES // 4  # float32 elements


def sizes_of(nranks):
    """Empty, tiny, around a cache line, prime, not divisible, and chunks of several segments."""
    return sorted({0, 1, nranks - 1, 15, 16, 17, 97, 1009, 16 * nranks + 1, SEGMENT * nranks + 4099})


class Groups:
    """The groups of each (backend, nranks), opened once and again only after they were left in pieces."""

    def __init__(self):
        self._open = {}

    def of(self, backend, nranks):
        if (backend, nranks) not in self._open:
            self._open[backend, nranks] = open_groups(backend, nranks)
        return self._open[backend, nranks]

    def run(self, backend, nranks, function):
        try:
            return on_ranks(self.of(backend, nranks), function)
        except BaseException:
            self._close(self._open.pop((backend, nranks), []))
            raise

    def close(self):
        for groups in self._open.values():
            self._close(groups)

    def _close(self, groups):
        for group in groups:
            group.close()


@pytest.fixture(scope="module")
def groups():
    every = Groups()
    yield every
    every.close()


backends = pytest.mark.parametrize("backend", BACKENDS)
ranks = pytest.mark.parametrize("nranks", NRANKS, ids="N{}".format)


def test_the_samples_tell_orders_of_summation_apart():
    a, b, c = (sample(rank, 10_000, "float32") for rank in range(3))
    assert np.mean((a + b) + c != a + (b + c)) > 0.1


@backends
@ranks
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_all_reduce_equals_a_naive_sum_in_canonical_order(groups, backend, nranks, dtype, op):
    def body(group):
        results = []
        for size in sizes_of(nranks):
            array = sample(group.rank, size, dtype)
            group.all_reduce(array, op)
            results.append(array)
        return results

    expected = [reduced([sample(r, size, dtype) for r in range(nranks)], op) for size in sizes_of(nranks)]
    for results in groups.run(backend, nranks, body):
        for result, right in zip(results, expected, strict=True):
            assert_same_bits(result, right)


@backends
@ranks
def test_memory_of_the_group_gives_the_same_as_any_other(groups, backend, nranks):
    shape = (3, 2, 40_013)

    def body(group):
        array = group.empty(shape)
        array[...] = sample(group.rank, shape, "float32")
        group.all_reduce(array)
        return array

    expected = reduced([sample(r, shape, "float32") for r in range(nranks)], "mean")
    for result in groups.run(backend, nranks, body):
        assert_same_bits(result, expected)


@backends
def test_parts_of_one_array_may_be_reduced_one_after_the_other(groups, backend):
    """As buckets are, back to back and without a barrier; what lies between them is left alone."""
    parts = [slice(1, 18), slice(32, 32), slice(64, 5000), slice(5003, 300_000)]

    def body(group):
        array = group.empty(300_001)
        array[...] = sample(group.rank, array.size, "float32")
        for step in range(3):
            for bucket, part in enumerate(parts):
                group.all_reduce(array[part], "mean", step=step, bucket=bucket)
        return array

    inputs = [sample(r, 300_001, "float32") for r in range(3)]
    for rank, result in enumerate(groups.run(backend, 3, body)):
        expected = inputs[rank].copy()
        for part in parts:
            arrays = [x[part] for x in inputs]
            for _ in range(3):
                arrays = [reduced(arrays, "mean")] * 3
            expected[part] = arrays[0]
        assert_same_bits(result, expected)


@backends
def test_special_floats_survive(groups, backend):
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 3.4e38, 1.0], np.float32)

    def mine(rank):
        return np.tile(np.roll(special, rank), 7)

    def body(group):
        array = mine(group.rank)
        with np.errstate(all="ignore"):
            group.all_reduce(array, "sum")
        return array

    with np.errstate(all="ignore"):
        expected = reduced([mine(r) for r in range(3)], "sum")
    for result in groups.run(backend, 3, body):
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(np.signbit(result), np.signbit(expected))


def check_random_all_reduce(groups, backend, nranks, size, case, seed):
    dtype, op = case

    def body(group):
        array = sample(group.rank, size, dtype, seed=seed)
        group.all_reduce(array, op)
        return array

    expected = reduced([sample(r, size, dtype, seed=seed) for r in range(nranks)], op)
    for result in groups.run(backend, nranks, body):
        assert_same_bits(result, expected)


random_calls = given(
    nranks=st.integers(1, 5),
    size=st.one_of(st.integers(0, 300), st.integers(SEGMENT - 20, 2 * SEGMENT)),
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=300, deadline=None)
@random_calls
def test_random_all_reduces_in_memory(groups, nranks, size, case, seed):
    check_random_all_reduce(groups, "memory", nranks, size, case, seed)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@settings(max_examples=120, deadline=None)
@random_calls
def test_random_all_reduces(groups, backend, nranks, size, case, seed):
    check_random_all_reduce(groups, backend, nranks, size, case, seed)


def test_all_backends_give_the_same_bits(groups):
    def body(group):
        arrays = [sample(group.rank, size, dtype) for size in sizes_of(4) for dtype, _ in CASES]
        for array, (_, op) in zip(arrays, CASES * len(sizes_of(4)), strict=True):
            group.all_reduce(array, op)
        return b"".join(array.tobytes() for array in arrays)

    results = [result for backend in BACKENDS for result in groups.run(backend, 4, body)]
    assert len(results[0]) > 10**6
    assert set(results) == {results[0]}


@backends
@ranks
def test_all_gather_stacks_in_rank_order(groups, backend, nranks):
    cases = [((0,), "float32"), ((1,), "uint8"), ((3, 5), "float64"), ((2, SEGMENT + 17), "float32")]

    def mine(rank, shape, dtype, k):
        return sample(rank, shape, dtype, seed=k)

    def body(group):
        return [group.all_gather(mine(group.rank, *case, k)) for k, case in enumerate(cases)]

    for results in groups.run(backend, nranks, body):
        for result, (k, case) in zip(results, enumerate(cases), strict=True):
            assert_same_bits(result, np.stack([mine(r, *case, k) for r in range(nranks)]))


@backends
def test_all_gather_takes_what_is_not_contiguous_and_leaves_it_alone(groups, backend):
    def body(group):
        array = sample(group.rank, (40, 6), "float32")
        gathered = group.all_gather(array[::3, 1:4])
        assert_same_bits(array, sample(group.rank, (40, 6), "float32"))
        return gathered

    for result in groups.run(backend, 3, body):
        assert_same_bits(result, np.stack([sample(r, (40, 6), "float32")[::3, 1:4] for r in range(3)]))


@backends
@ranks
def test_broadcast_copies_each_root(groups, backend, nranks):
    def body(group):
        results = []
        for root in range(nranks):
            for size in (0, 1, 17, 2 * SEGMENT + 5):
                array = sample(group.rank, size, "float32", seed=root)
                group.broadcast(array, root)
                results.append(array)
        return results

    expected = [
        sample(root, size, "float32", seed=root) for root in range(nranks) for size in (0, 1, 17, 2 * SEGMENT + 5)
    ]
    for results in groups.run(backend, nranks, body):
        for result, right in zip(results, expected, strict=True):
            assert_same_bits(result, right)


@backends
@ranks
def test_nobody_leaves_a_barrier_before_everyone_has_come(groups, backend, nranks):
    came = []

    def body(group):
        for i in range(20):
            came.append(i)
            group.barrier()
            assert came.count(i) == nranks
            group.barrier()

    groups.run(backend, nranks, body)


def late(transport, until):
    """Let this rank receive late: once the event is set, or after a moment."""
    for name in ("receive", "receive_into"):
        setattr(transport, name, partial(wait_and_call, until, getattr(transport, name)))


def wait_and_call(until, method, *args):
    until.wait(0.05)
    return method(*args)


@backends
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_gather"])
def test_what_an_operation_returned_may_be_overwritten_at_once(backend, operation):
    """Although the right neighbour has yet to read the last of it."""
    inputs, overwritten = [sample(rank, 1009, "float32") for rank in range(2)], threading.Event()
    expected = {"all_reduce": reduced(inputs, "mean"), "broadcast": inputs[0], "all_gather": np.stack(inputs)}

    def body(group):
        array = group.empty(1009)
        array[...] = inputs[group.rank]
        result = getattr(group, operation)(array)
        result = array if result is None else result
        if group.rank == 0:
            result.fill(np.nan)
            overwritten.set()
        return result

    with opened(backend, 2) as every:
        late(every[1]._transport, overwritten)
        assert_same_bits(on_ranks(every, body)[1], expected[operation])


@backends
def test_operations_may_follow_each_other_in_any_mix(groups, backend):
    def body(group):
        a, b = np.full(17, group.rank + 1.0), np.full((2, 3), group.rank, np.int64)
        for _ in range(10):
            group.all_reduce(a, "mean")
            group.broadcast(b, 2)
            group.barrier()
            a[:] = group.all_gather(a).sum(0)
        return a[0], b[0, 0]

    assert groups.run(backend, 3, body) == [(2.0 * 3**10, 2)] * 3


@pytest.mark.parametrize(
    ("array", "op", "error", "text"),
    [
        (np.zeros(4, "f4"), "max", ValueError, "op must be one of sum, mean (got 'max')"),
        (np.zeros(4, "f2"), "sum", TypeError, "dtype must be one of float32, float64, int32, int64 (got float16)"),
        (np.zeros(4, "u1"), "sum", TypeError, "dtype must be one of float32, float64, int32, int64 (got uint8)"),
        (np.zeros(4, "c8"), "sum", TypeError, "dtype must be one of float32, float64, int32, int64 (got complex64)"),
        (np.zeros(4, "i4"), "mean", ValueError, "the mean of integers is not an integer (got int32); use op='sum'"),
        (np.zeros(4, "i8"), "mean", ValueError, "the mean of integers is not an integer (got int64); use op='sum'"),
        (np.zeros((4, 4), "f4").T[:2], "sum", ValueError, "array must be contiguous (got strides (4, 16))"),
        (np.zeros(8, "f4")[::2], "mean", ValueError, "array must be contiguous (got strides (8,))"),
    ],
)
@pytest.mark.parametrize("nranks", [1, 2])
def test_bad_arguments_are_refused_before_anything_is_sent(nranks, array, op, error, text):
    group = mesh_groups("memory", nranks)[0]
    with pytest.raises(error) as caught:
        group.all_reduce(array, op)
    assert str(caught.value) == text
    assert group._transport._out.messages.empty()


@pytest.mark.parametrize("root", [-1, 2])
def test_broadcast_from_no_rank_is_refused(root):
    with pytest.raises(UsageError, match=f"rank {root} is outside 0..1"):
        mesh_groups("memory", 2)[0].broadcast(np.zeros(3), root)


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


@backends
def test_shapes_that_differ_are_a_protocol_error(backend):
    def body(group):
        group.all_reduce(np.ones(100 + 100 * group.rank, np.float32))

    with opened(backend, 2) as every:
        errors = errors_on(every, body)
    assert all(errors)
    assert any(isinstance(error, ProtocolError) for error in errors)


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


@backends
def test_the_group_says_who_it_is(groups, backend):
    names = [(g.rank, g.nranks, g.backend) for g in groups.of(backend, 3)]
    assert names == [(rank, 3, backend) for rank in range(3)]


@backends
@pytest.mark.parametrize("shape", [(), 0, 5, (0, 3), (2, 3, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_has_the_shape_and_dtype_asked_for(groups, backend, shape, dtype):
    array = groups.of(backend, 2)[0].empty(shape, dtype)
    assert (array.shape, array.dtype) == (np.empty(shape).shape, dtype)
    assert array.flags.c_contiguous


# connect


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def connected(*calls):
    """Make the calls (keyword arguments of `connect`) side by side; the errors, and None where it connected."""

    def body(i):
        collective.connect(**calls[i]).close()

    return [outcome.error for outcome in outcomes_of(len(calls), body)]


@pytest.mark.parametrize(("backend", "kind"), [("auto", "shm"), ("shm", "shm"), ("tcp", "tcp")])
def test_ranks_meet_at_a_port(backend, kind):
    """Rank 0 comes last."""
    rendezvous = f"127.0.0.1:{free_port()}"
    others_try = threading.Event()

    def body(rank):
        if rank == 0:
            others_try.wait(1)
        else:
            others_try.set()
        with collective.connect(rank, 2, rendezvous, backend) as group:
            return group.backend, group.all_gather(np.array([rank + 10])).ravel().tolist()

    assert on_threads(2, body) == [(kind, [10, 11])] * 2


def test_one_rank_needs_nobody():
    with collective.connect(0, 1, "127.0.0.1:1") as group:
        array = sample(0, 17, "float32")
        group.all_reduce(array)
        assert_same_bits(array, sample(0, 17, "float32"))
        assert (group.backend, group.rank, group.nranks) == ("shm", 0, 1)


@pytest.mark.parametrize(("rank", "nranks"), [(2, 2), (-1, 2), (1, 1)])
def test_a_rank_out_of_range_is_refused(rank, nranks):
    with pytest.raises(UsageError, match=rf"rank {rank} is outside 0\.\.{nranks - 1} \(--nranks {nranks}\)"):
        collective.connect(rank, nranks)


def test_no_ranks_are_refused():
    with pytest.raises(UsageError, match=r"--nranks must be at least 1 \(got 0\)"):
        collective.connect(0, 0)


@pytest.mark.parametrize(
    ("name", "hint"), [("shmm", "; did you mean 'shm'?"), ("tpc", "; did you mean 'tcp'?"), ("xyz", "")]
)
def test_an_unknown_backend_is_refused_with_the_nearest_name(name, hint):
    with pytest.raises(UsageError) as caught:
        collective.connect(0, 2, backend=name)
    assert str(caught.value) == f"unknown backend {name!r}{hint} (known: {', '.join(CONNECT_BACKENDS)})"


def test_shared_memory_between_hosts_is_refused():
    with pytest.raises(UsageError, match=r"backend shm needs all ranks on one host, the rendezvous is at 192\.0\.2\.1"):
        collective.connect(1, 2, "192.0.2.1:8600", "shm")


def test_nobody_at_the_rendezvous_is_named_within_the_timeout():
    rendezvous = f"127.0.0.1:{free_port()}"
    begin = time.monotonic()
    (error,) = connected({"rank": 1, "nranks": 2, "rendezvous": rendezvous, "timeout": 0.5})
    assert type(error) is PeerUnreachable
    assert rendezvous in str(error)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_rank_that_never_comes_is_named_by_all(backend):
    common = {"nranks": 3, "rendezvous": abstract_address("test"), "backend": backend, "timeout": 1.5}
    for error in connected({"rank": 0, **common}, {"rank": 2, **common}):
        assert type(error) is RendezvousError
        assert "missing: rank 1" in str(error)


def test_ranks_that_disagree_on_nranks_all_learn_it():
    common = {"rendezvous": abstract_address("test"), "timeout": 30.0}
    errors = connected({"rank": 0, "nranks": 2, **common}, {"rank": 1, "nranks": 3, **common})
    for error in errors:
        assert type(error) is RendezvousError
        assert "rank 1 was started with nranks 3, the group with 2" in str(error)


def test_ranks_that_disagree_on_the_backend_all_learn_it():
    common = {"nranks": 2, "rendezvous": abstract_address("test"), "timeout": 30.0}
    errors = connected({"rank": 0, "backend": "shm", **common}, {"rank": 1, "backend": "tcp", **common})
    for error in errors:
        assert type(error) is RendezvousError
        assert "ranks disagree on the backend: shm, tcp" in str(error)


def test_a_rank_that_comes_twice_is_named_by_all():
    common = {"nranks": 3, "rendezvous": abstract_address("test"), "timeout": 30.0}
    errors = connected({"rank": 0, **common}, {"rank": 1, **common}, {"rank": 1, **common})
    for error in errors:
        assert type(error) is RendezvousError
        assert "rank 1 joined twice" in str(error)


def test_a_rendezvous_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (error,) = connected({"rank": 0, "nranks": 2, "rendezvous": address, "timeout": 5.0})
    assert type(error) is PortInUse
    assert address in str(error)
