"""The collective operations against naive NumPy, bit for bit, over every backend; and what `connect` refuses."""

from __future__ import annotations

import os
import socket
import threading
import time
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collective
from collective.algorithms.direct import SHORT_BYTES
from collective.algorithms.exchange import SHORT_BYTES as EXCHANGED_BYTES
from collective.group import ALGORITHMS, lay_out
from collective.group import BACKENDS as CONNECT_BACKENDS
from collective.transports.base import SEGMENT_BYTES
from common.errors import (
    PeerError,
    PeerLost,
    PeerUnreachable,
    PortInUse,
    ProtocolError,
    RendezvousError,
    StaleEpoch,
    UsageError,
)
from common.launch.launch import abstract_address
from common.tensors.buckets import chunk_bounds
from common.tensors.reduction import DTYPES, OPS
from tests.support.groups import (
    BACKENDS,
    CANONICAL,
    DEADLINE_S,
    assert_same_bits,
    board_of,
    cuts_of,
    errors_on,
    free_port,
    mesh_groups,
    on_ranks,
    on_threads,
    open_groups,
    opened,
    outcomes_of,
    reduced,
    sample,
    transport_of,
)

NRANKS = (1, 2, 3, 4, 5)
CASES = [(dtype, op) for dtype in DTYPES for op in OPS if op != "mean" or dtype.startswith("float")]
SEGMENT = SEGMENT_BYTES // 4  # float32 elements
LONG = bool(os.environ.get("GRADSYNC_LONG_TESTS"))  # `make test-long`: what takes too long for every change
BIG = 10_000_001 if LONG else 1_000_003
EXAMPLES = 2000 if LONG else 120
OWNERS = {
    "all": {0, 1},
    "none": set(),
    "even": {0},
    "odd": {1},
}  # ranks mod 2 whose arrays are the group's
BIG_CASES = [(owners, "float32", "mean") for owners in OWNERS] + [("even", *case) for case in CASES if LONG]


def sizes_of(nranks):
    """Empty, tiny, around a cache line, prime, around what is short, not divisible, chunks of several segments."""
    short = SHORT_BYTES // 4
    around = {short - 1, short, short + 1}
    return sorted({0, 1, nranks - 1, 15, 16, 17, 97, 1009, 16 * nranks + 1, SEGMENT * nranks + 4099, *around})


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


backends = pytest.mark.parametrize("backend", CANONICAL)
ranks = pytest.mark.parametrize("nranks", NRANKS, ids="N{}".format)


def test_the_samples_tell_orders_of_summation_apart():
    a, b, c = (sample(rank, 10_000, "float32") for rank in range(3))
    assert np.mean((a + b) + c != a + (b + c)) > 0.1


pools = WeakKeyDictionary()  # of each group; its memory is freed with it, and not before


def filled(group, size, dtype, shared, *, seed=0):
    """The rank's sample, elsewhere or in the group's memory: there only until the next call."""
    return placed(group, sample(group.rank, size, dtype, seed=seed), shared, at=64 * (seed % 3))


def placed(group, values, shared, *, at=0):
    array = np.empty_like(values)
    if shared:
        pool = pools.get(group)
        if pool is None:
            pool = pools[group] = group.empty(8 * BIG, np.uint8)
        array = pool[at:][: array.nbytes].view(values.dtype)
    array[...] = values
    return array


everywhere = pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])


@backends
@ranks
@everywhere
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_all_reduce_equals_a_naive_reduction_in_canonical_order(groups, backend, nranks, shared, dtype, op):
    def body(group):
        results = []
        for size in sizes_of(nranks):
            array = filled(group, size, dtype, shared)
            group.all_reduce(array, op)
            results.append(array.copy())
        return results

    expected = [reduced([sample(r, size, dtype) for r in range(nranks)], op) for size in sizes_of(nranks)]
    for results in groups.run(backend, nranks, body):
        for result, right in zip(results, expected, strict=True):
            assert_same_bits(result, right)


@backends
@ranks
@everywhere
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_reduce_scatter_gives_each_rank_its_chunk(groups, backend, nranks, shared, dtype, op):
    def body(group):
        results = []
        for size in sizes_of(nranks):
            array = filled(group, size, dtype, shared)
            result = group.reduce_scatter(array, op)
            assert np.shares_memory(result, array) or result.size == 0
            results.append(result.copy())
        return results

    every = groups.run(backend, nranks, body)
    for i, size in enumerate(sizes_of(nranks)):
        expected, cuts = reduced([sample(r, size, dtype) for r in range(nranks)], op), cuts_of(size, nranks)
        for rank in range(nranks):
            assert_same_bits(every[rank][i], expected[cuts[rank] : cuts[rank + 1]])


@backends
@ranks
@pytest.mark.parametrize(("owners", "dtype", "op"), BIG_CASES)
def test_millions_of_elements_wherever_each_rank_has_them(groups, backend, nranks, owners, dtype, op):
    """Ranks need not agree on whose arrays lie in the group's memory."""
    shared = OWNERS[owners]

    def body(group):
        array = placed(group, values[group.rank], group.rank % 2 in shared)
        group.all_reduce(array, op)
        result = array.copy()
        chunk = group.reduce_scatter(placed(group, values[group.rank], group.rank % 2 in shared), op)
        return result, chunk

    values = [np.resize(sample(r, 1_000_003, dtype), BIG) for r in range(nranks)]
    expected = reduced(values, op)
    cuts = cuts_of(BIG, nranks)
    for rank, (array, chunk) in enumerate(groups.run(backend, nranks, body)):
        assert_same_bits(array, expected)
        assert_same_bits(chunk, expected[cuts[rank] : cuts[rank + 1]])


@pytest.mark.parametrize(("nranks", "each"), [(6, 3), (6, 2), (8, 2), (8, 4), (9, 3)])
def test_hosts_of_any_number_and_size_give_the_same_bits(monkeypatch, nranks, each):
    """As a hierarchy: sums that begin and end in the middle of a host, arrays that lie in shared memory or do not."""
    monkeypatch.setattr("tests.support.groups.hosts_of", lambda n: [f"host {rank // each}" for rank in range(n)])
    sizes = (0, 1, nranks - 1, 1009, 300_001)

    def body(group):
        results = []
        for shared in (False, True):
            for size in sizes:
                array = filled(group, size, "float32", shared and size % 2)
                group.all_reduce(array)
                results.append(array.copy())
            half = filled(group, 1009, "float16", shared)
            group.all_reduce(half)
            results.append(half.copy())
        array = filled(group, 300_001, "float32", group.rank % 3 == 0)
        chunk = group.reduce_scatter(array).copy()
        group.gather_chunks(array)
        roots = [sample(group.rank, 70_001, "float64", seed=root) for root in (0, nranks // 2, nranks - 1)]
        for root, values in zip((0, nranks // 2, nranks - 1), roots, strict=True):
            group.broadcast(values, root)
        return results, chunk, array, roots, group.all_gather(sample(group.rank, (3, 5), "int32"))

    def expected(size, dtype="float32"):
        return reduced([sample(r, size, dtype) for r in range(nranks)], "mean")

    right = [*map(expected, sizes), expected(1009, "float16")] * 2
    cuts = cuts_of(300_001, nranks)
    with opened("tcp-hierarchical", nranks) as every:
        assert {group.algorithm for group in every} == {"hierarchical"}
        for rank, (results, chunk, array, roots, stacked) in enumerate(on_ranks(every, body)):
            for result, values in zip(results, right, strict=True):
                assert_same_bits(result, values)
            assert_same_bits(chunk, expected(300_001)[cuts[rank] : cuts[rank + 1]])
            assert_same_bits(array, expected(300_001))
            for root, values in zip((0, nranks // 2, nranks - 1), roots, strict=True):
                assert_same_bits(values, sample(root, 70_001, "float64", seed=root))
            assert_same_bits(stacked, np.stack([sample(r, (3, 5), "int32") for r in range(nranks)]))


@pytest.mark.parametrize(
    ("hosts", "algorithm", "local", "linked"),
    [
        ("aabb", "hierarchical", [2, 3], [1]),
        ("aaabbbccc", "hierarchical", [3, 4, 5], [0, 6]),
        ("abcd", "direct", [], [0, 1, 2]),
        ("aaaa", "direct", [], [0, 1, 2]),
        ("abab", "direct", [], [0, 1, 2]),
        ("aabbb", "direct", [], [0, 1, 2, 4]),
    ],
)
def test_auto_takes_the_hierarchy_where_hosts_are_alike(hosts, algorithm, local, linked):
    layout = lay_out("tcp", "auto", 3, list(hosts))
    assert (layout.algorithm, [*layout.local], [*layout.linked]) == (algorithm, local, linked)


@pytest.mark.parametrize(("hosts", "counts"), [("aaaa", "4"), ("aab", "2, 1"), ("abab", "2, 2")])
def test_a_hierarchy_that_does_not_fit_is_refused(hosts, counts):
    with pytest.raises(UsageError) as caught:
        lay_out("tcp", "hierarchical", 1, list(hosts))
    assert str(caught.value) == (
        "algorithm hierarchical needs two or more hosts with equally many ranks, numbered host by host "
        f"(ranks on each host here: {counts}); use direct"
    )
    with pytest.raises(UsageError, match=r"algorithm hierarchical is for ranks of several hosts \(backend is shm\)"):
        collective.connect(0, 2, algorithm="hierarchical")


@pytest.mark.parametrize("nranks", [2, 3])
def test_over_tcp_short_and_long_arrays_agree(groups, nranks):
    """One goes straight to its reducers, the other round the ring."""
    limit = EXCHANGED_BYTES // nranks // 4

    def body(group):
        array = sample(group.rank, limit + 1, "float32")
        short, scattered = array[:limit].copy(), array[:limit].copy()
        for each in (array, short):
            group.all_reduce(each)
        group.reduce_scatter(scattered)
        group.gather_chunks(scattered)
        return array, short, scattered

    inputs = [sample(r, limit + 1, "float32") for r in range(nranks)]
    expected = reduced(inputs, "mean"), *[reduced([x[:limit] for x in inputs], "mean")] * 2
    for results in groups.run("tcp", nranks, body):
        for result, right in zip(results, expected, strict=True):
            assert_same_bits(result, right)


def test_over_tcp_a_short_array_and_a_long_one_do_not_mix():
    def body(group):
        group.all_reduce(ones(EXCHANGED_BYTES // 3 // 4 + (group.rank == 1)), "sum")

    with opened("tcp", 3) as every:
        errors = errors_on(every, body)
    assert all(isinstance(error, (ProtocolError, PeerError)) for error in errors), errors
    assert any(isinstance(error, ProtocolError) for error in errors)


STRIDED = {
    "step": lambda: np.zeros(40_013, "f4")[::2],
    "reversed": lambda: np.zeros(20_007, "f4")[::-1],
    "transposed": lambda: np.zeros((97, 203), "f4").T,
    "columns": lambda: np.zeros((203, 97), "f4")[:, 3:50],
    "short": lambda: np.zeros((5, 4), "f4").T,
    "Fortran": lambda: np.zeros((3, 4, 5), "f4", order="F"),
}


@backends
@pytest.mark.parametrize("kind", STRIDED)
def test_arrays_that_are_not_contiguous_are_reduced_too(groups, backend, kind):
    shape = STRIDED[kind]().shape

    def body(group):
        array = STRIDED[kind]()
        array[...] = sample(group.rank, shape, "float32")
        again = array.copy()  # contiguous
        group.all_reduce(array)
        chunk = group.reduce_scatter(again[::-1][::-1])
        group.broadcast(other := np.asfortranarray(sample(group.rank, shape, "float32")), 1)
        base = array.base if array.base is not None else array
        untouched = np.count_nonzero(base) - np.count_nonzero(array)
        return array, chunk, other, untouched

    expected = reduced([sample(r, shape, "float32") for r in range(3)], "mean")
    cuts = cuts_of(expected.size, 3)
    for rank, (array, chunk, other, untouched) in enumerate(groups.run(backend, 3, body)):
        assert_same_bits(array, expected)
        assert_same_bits(chunk, expected.reshape(-1)[cuts[rank] : cuts[rank + 1]])
        assert_same_bits(other, sample(1, shape, "float32"))
        assert untouched == 0


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
    numbers = ~np.isnan(expected)  # the sign of a NaN is that of whichever operand the processor takes it from
    for result in groups.run(backend, 3, body):
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(np.signbit(result[numbers]), np.signbit(expected[numbers]))


@backends
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [97, 300_001])
def test_the_maximum_with_nan_is_nan(groups, backend, dtype, size):
    def body(group):
        array = sample(group.rank, size, dtype)
        array[group.rank :: 7] = np.nan
        array[5::7] = [-np.inf, np.inf, 1][group.rank]
        group.all_reduce(array, "max")
        return array

    expected = np.max([sample(r, size, dtype) for r in range(3)], axis=0)
    expected[5::7] = np.inf
    for r in range(3):
        expected[r::7] = np.nan
    for result in groups.run(backend, 3, body):
        np.testing.assert_array_equal(result, expected)


@backends
def test_float16_sums_round_once(groups, backend):
    """Rounded at every addition, 2048 + 1 + 1 would stay 2048; and 1/3 in float16 would be off."""
    values = [2048.0, 1.0, 1.0]

    def body(group):
        sums, means = np.full((2, 5000), values[group.rank], np.float16)
        group.all_reduce(sums, "sum")
        group.all_reduce(means, "mean")
        return sums, means

    for sums, means in groups.run(backend, 3, body):
        assert set(sums.tolist()) == {2050.0}
        assert set(means.tolist()) == {float(np.float16(np.float32(2050) * np.float32(1 / 3)))}


def check_random_all_reduce(groups, backend, nranks, size, case, seed):
    """Even seeds use the group's memory."""
    dtype, op = case

    def body(group):
        array = filled(group, size, dtype, seed % 2 == 0, seed=seed)
        group.all_reduce(array, op)
        return array

    expected = reduced([sample(r, size, dtype, seed=seed) for r in range(nranks)], op)
    for result in groups.run(backend, nranks, body):
        assert_same_bits(result, expected)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "ordinary"])
@pytest.mark.parametrize("size", [0, 1, 2, 47, 1009, 700_001])
@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
@backends
def test_scattered_chunks_are_gathered_to_an_all_reduce(groups, backend, nranks, size, shared):
    def body(group):
        array = filled(group, size, "float32", shared)
        group.reduce_scatter(array, "mean")
        group.gather_chunks(array)
        return array

    expected = reduced([sample(r, size, "float32") for r in range(nranks)], "mean")
    for result in groups.run(backend, nranks, body):
        assert_same_bits(result, expected)


@backends
def test_chunks_of_some_in_shared_memory_and_some_not_are_gathered(groups, backend):
    def body(group):
        array = filled(group, 300_000, "int64", group.rank == 1)[::2]
        mine = slice(*chunk_bounds(array.size, 3)[group.rank])
        kept = array[mine].copy()
        group.gather_chunks(array)
        return array, kept

    results = groups.run(backend, 3, body)
    expected = np.concatenate([kept for _, kept in results])
    for array, _ in results:
        assert_same_bits(array, expected)


random_calls = given(
    nranks=st.integers(1, 5),
    size=st.one_of(st.integers(0, 300), st.integers(1000, 5000), st.integers(SEGMENT - 20, 2 * SEGMENT)),
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=max(300, EXAMPLES), deadline=None)
@random_calls
def test_random_all_reduces_in_memory(groups, nranks, size, case, seed):
    check_random_all_reduce(groups, "memory", nranks, size, case, seed)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@settings(max_examples=EXAMPLES, deadline=None)
@random_calls
def test_random_all_reduces(groups, backend, nranks, size, case, seed):
    check_random_all_reduce(groups, backend, nranks, size, case, seed)


def test_all_backends_give_the_same_bits(groups):
    def body(group):
        arrays = [sample(group.rank, size, dtype) for size in sizes_of(4) for dtype, _ in CASES]
        for array, (_, op) in zip(arrays, CASES * len(sizes_of(4)), strict=True):
            group.all_reduce(array, op)
        return b"".join(array.tobytes() for array in arrays)

    results = [result for backend in CANONICAL for result in groups.run(backend, 4, body)]
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


def late(group, until):
    """Let this rank read late what others sent: once the event is set, or after a moment."""
    if hasattr(group._algorithm, "transport"):
        transport = transport_of(group)
        transport = getattr(transport, "links", transport)
        for name in {"receive", "receive_into"} & {*dir(transport)}:
            setattr(transport, name, partial(wait_and_call, until, getattr(transport, name)))
    else:
        board_of(group).meet = partial(call_and_wait, until, board_of(group).meet)


def wait_and_call(until, method, *args):
    until.wait(0.05)
    return method(*args)


def call_and_wait(until, method):
    method()
    until.wait(0.05)


@pytest.mark.parametrize("backend", BACKENDS)
@everywhere
@pytest.mark.parametrize("size", [1009, 300_007])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "broadcast", "all_gather"])
def test_what_an_operation_returned_may_be_overwritten_at_once(backend, operation, size, shared):
    """Although the right neighbour has yet to read the last of it."""
    inputs, overwritten = [sample(rank, size, "float32") for rank in range(2)], threading.Event()
    expected = {
        "all_reduce": reduced(inputs, "mean"),
        "reduce_scatter": reduced(inputs, "mean")[cuts_of(size, 2)[1] :],
        "broadcast": inputs[0],
        "all_gather": np.stack(inputs),
    }

    def body(group):
        array = filled(group, size, "float32", shared)
        result = getattr(group, operation)(array)
        result = array if result is None else result
        if group.rank == 0:
            result.fill(np.nan)
            overwritten.set()
        return result

    with opened(backend, 2) as every:
        late(every[1], overwritten)
        assert_same_bits(on_ranks(every, body)[1], expected[operation])


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_a_rank_that_is_quick_may_post_for_the_next_short_call(operation):
    """Though others have yet to read what all have posted for this one."""
    first, second = ([sample(rank, 1009, "float32", seed=seed) for rank in range(2)] for seed in (1, 2))
    posted = threading.Event()

    def body(group):
        if group.rank == 0:
            exchange = board_of(group).exchange

            def exchange_and_tell(note):
                if group._calls == 2:  # all chunks of the second call are posted
                    posted.set()
                return exchange(note)

            board_of(group).exchange = exchange_and_tell
        arrays = [inputs[group.rank].copy() for inputs in (first, second)]
        results = [getattr(group, operation)(array, "sum") for array in arrays]
        return arrays if operation == "all_reduce" else results

    with opened("shm", 2) as every:
        late(every[1], posted)
        results = on_ranks(every, body)
    for rank, found in enumerate(results):
        mine = slice(None) if operation == "all_reduce" else slice(*chunk_bounds(1009, 2)[rank])
        for result, inputs in zip(found, (first, second), strict=True):
            assert_same_bits(result, reduced(inputs, "sum")[mine])


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


def test_an_array_is_had_in_common_by_all_or_by_none():
    def body(group):
        whole, other = group.empty(1000), np.zeros(1000, np.float32)
        part = group.empty(1000 + 16)[:1000]
        kinds = [whole, other, part]
        found = [group.have_in_common(kinds[kind if group.rank == 1 else 0]) for kind in (1, 2, 0)]
        whole[group.rank] = 7 + group.rank
        group.barrier()
        return found, whole[:2].tolist()

    with opened("shm", 2) as groups:
        assert on_ranks(groups, body) == [([False, False, True], [7, 8])] * 2


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
    assert transport_of(group)._out.messages.empty()


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


def ones(size, dtype="float32"):
    return np.ones(size, dtype)


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


@backends
@everywhere
@pytest.mark.parametrize("what", MISMATCHES)
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


@backends
@pytest.mark.parametrize("shape", [(), 0, 5, (0, 3), (2, 3, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_has_the_shape_and_dtype_asked_for(groups, backend, shape, dtype):
    array = groups.of(backend, 2)[0].empty(shape, dtype)
    assert (array.shape, array.dtype) == (np.empty(shape).shape, dtype)
    assert array.flags.c_contiguous


# connect


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


@pytest.mark.parametrize(
    ("backend", "algorithm", "used"),
    [
        ("auto", "auto", "direct"),
        ("shm", "direct", "direct"),
        ("shm", "ring", "ring"),
        ("tcp", "ring", "ring"),
        ("tcp", "auto", "direct"),
    ],
)
def test_the_algorithm_may_be_chosen(backend, algorithm, used):
    rendezvous = abstract_address("test")

    def body(rank):
        with collective.connect(rank, 2, rendezvous, backend, algorithm=algorithm) as group:
            array = np.full(10_000, rank + 1.0)
            group.all_reduce(array)
            return group.algorithm, set(array.tolist())

    assert on_threads(2, body) == [(used, {1.5})] * 2


def test_an_algorithm_that_does_not_exist_is_refused():
    with pytest.raises(UsageError) as caught:
        collective.connect(0, 2, algorithm="rign")
    assert str(caught.value) == f"unknown algorithm 'rign'; did you mean 'ring'? (known: {', '.join(ALGORITHMS)})"


def test_ranks_that_disagree_on_the_algorithm_all_learn_it():
    common = {"nranks": 2, "rendezvous": abstract_address("test"), "timeout": 30.0}
    for error in connected({"rank": 0, **common}, {"rank": 1, "algorithm": "ring", **common}):
        assert type(error) is RendezvousError
        assert "ranks disagree on the backend: shm, shm with algorithm ring" in str(error)


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
