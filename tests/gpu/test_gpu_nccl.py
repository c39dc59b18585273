"""NCCL on real GPUs: results, faults and overhead. `python -m pytest -m gpu tests/gpu`; needs neither Paddle nor tyro.

Ranks are processes. Where there are fewer GPUs than ranks they share one, which needs NCCL 2.30.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from statistics import median

import numpy as np
import pytest

import collective
from collective.nccl.algorithm import END_S, EXPLAIN_S
from collective.nccl.binding import load_binding
from collective.nccl.cuda import count_gpus
from collective.nccl.seat import SHARING_VERSION
from common.errors import UsageError
from common.launch.ranks import abstract_address
from common.tensors.reduction import DTYPES, OPS
from tests.support.groups import RankProcesses, assert_same_bits, cuts_of, limit_waits, reduced, sample, say

GPUS = count_gpus()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="no CUDA GPU, or no CuPy that sees one"),
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("default"),  # CuPy's and PyTorch's are not ours to mend
]
NRANKS = (2, 3, 4)
BIG = 1_000_003
SIZES = (0, 1, 15, 17, 97, 1009, 48_000, BIG)  # 48,000: chunks of one length for 2, 3 and 4 ranks
CASES = [(dtype, op) for dtype in DTYPES for op in OPS if op != "mean" or dtype.startswith("float")]
BACKENDS = ("nccl", "nccl-ring", "nccl+pynccl", "nccl-ring+pynccl")
LIMIT_S = 2.0  # the timeout in tests of a frozen rank
OVERHEAD_US = 20.0  # that we may add to a raw call at 64 KiB
CALLS, ROUNDS = 200, 15


def enough_for(nranks, backend="nccl"):
    """Skip, with the reason, what this host cannot run."""
    if "pynccl" in backend and not (importlib.util.find_spec("pynccl") and importlib.util.find_spec("numba")):
        pytest.skip("pynccl is not installed (pip install pynccl)")
    try:
        version = load_binding("pynccl" if "pynccl" in backend else "cupy").version
    except UsageError as exc:
        pytest.skip(str(exc))
    if nranks > GPUS and version < SHARING_VERSION:
        pytest.skip(f"{nranks} ranks on {GPUS} GPU, which NCCL {version} does not let them share (2.30 does)")


def all_end_well(ranks):
    for rank in range(len(ranks.processes)):
        end = ranks.hear(rank, "ended")
        assert end["ended"] == "well", f"rank {rank}: {end['text']}"
        assert ranks.code(rank) == 0


# Results


def bound(inputs, op):
    if op == "max" or inputs[0].dtype.kind == "i":
        return 0
    size = sum(np.abs(x.astype("f8")) for x in inputs)
    if inputs[0].dtype == np.float16:
        return (np.finfo("f4").eps * len(inputs) + np.finfo("f2").eps) * size
    return np.finfo(inputs[0].dtype).eps * len(inputs) * size


def assert_right(group, got, inputs, op):
    """The same bits where the order is ours; within every order's bound where it is NCCL's."""
    expected = reduced(inputs, op)
    if group.algorithm == "ring":
        assert_same_bits(got, expected)
    else:
        difference = np.abs(got.astype("f8") - expected.astype("f8"))
        assert (difference <= bound(inputs, op)).all(), f"off by {difference.max()}"


def naive(inputs, op):
    """In float64, in any order; wrapped as the integers are."""
    if op == "max":
        return np.max(inputs, 0).astype("f8")
    if inputs[0].dtype.kind == "i":
        return np.sum(inputs, 0, dtype=inputs[0].dtype).astype("f8")
    return np.sum(np.stack(inputs).astype("f8"), 0) / (len(inputs) if op == "mean" else 1)


def computes_what_numpy_computes(group):
    import cupy

    for dtype, op in CASES:
        for size in SIZES if op != "max" else SIZES[:-1]:
            inputs = [sample(rank, size, dtype) for rank in range(group.nranks)]
            mine, cuts = inputs[group.rank], cuts_of(size, group.nranks)
            on_gpu, on_host, parts = cupy.asarray(mine), mine.copy(), cupy.asarray(mine)
            group.all_reduce(on_gpu, op)
            assert_right(group, on_gpu.get(), inputs, op)
            group.all_reduce(on_host, op)
            assert_right(group, on_host, inputs, op)
            chunk = group.reduce_scatter(parts, op)
            mine_of = [x[cuts[group.rank] : cuts[group.rank + 1]] for x in inputs]
            if group.algorithm == "ring":
                assert_same_bits(chunk.get(), on_gpu.get()[cuts[group.rank] : cuts[group.rank + 1]])
            else:
                off = np.abs(chunk.get().astype("f8") - naive(mine_of, op)) - 2 * bound(mine_of, op)
                assert (off <= 0).all(), f"{dtype} {op} {size}: chunk off by {off.max()}"
            group.gather_chunks(parts := cupy.asarray(mine))
            assert_same_bits(
                parts.get(), np.concatenate([inputs[c][cuts[c] : cuts[c + 1]] for c in range(group.nranks)])
            )
            group.broadcast(given := cupy.asarray(mine), root=group.nranks - 1)
            assert_same_bits(given.get(), inputs[-1])
            assert_same_bits(group.all_gather(cupy.asarray(mine)).get(), np.stack(inputs))
            group.barrier()


def reduces_odd_layouts_and_nans(group):
    import cupy

    for make in (lambda a: a[::2, ::3], lambda a: a.T, lambda a: a[::-1]):
        for base in (cupy.zeros((61, 47), "f4"), np.zeros((61, 47), "f4")):
            array = make(base)
            inputs = [sample(rank, array.shape, "float32") for rank in range(group.nranks)]
            array[...] = cupy.asarray(inputs[group.rank]) if isinstance(base, cupy.ndarray) else inputs[group.rank]
            group.all_reduce(array, "mean")
            assert_right(group, np.ascontiguousarray(cupy.asnumpy(array)), inputs, "mean")
    array = cupy.asarray([1.0, 2.0, -3.0], dtype="f4")
    if group.rank == 1:
        array[1] = np.nan
    group.all_reduce(array, "max")
    np.testing.assert_array_equal(array.get(), [1.0, np.nan, -3.0])


def gives_the_bits_of_a_cpu_ring(group):
    """The other group has the same ranks, in the same processes, over TCP."""
    import cupy

    rendezvous = os.environ["GRADSYNC_TEST_RENDEZVOUS"]
    with collective.connect(group.rank, group.nranks, rendezvous, "tcp", algorithm="ring") as cpu:
        for dtype, op in CASES:
            ours, theirs = cupy.asarray(sample(group.rank, BIG, dtype)), sample(group.rank, BIG, dtype)
            group.all_reduce(ours, op)
            cpu.all_reduce(theirs, op)
            assert_same_bits(ours.get(), theirs)


def waits_for_whoever_made_the_data(group):
    """A slow kernel on another stream, and no synchronisation before the call: CuPy's array and another library's."""
    import cupy

    slow = cupy.RawKernel(
        'extern "C" __global__ void slow(float* x, long long n, float value) {'
        " long long until = clock64() + 200000000LL; while (clock64() < until) {}"
        " for (long long i = threadIdx.x; i < n; i += blockDim.x) x[i] = value; }",
        "slow",
    )
    expected = group.nranks * (group.nranks + 1) / 2
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            array = cupy.zeros(1000, "f4")
            slow((1,), (256,), (array, np.int64(array.size), np.float32(group.rank + 1)))
            group.all_reduce(array, "sum")
        np.testing.assert_array_equal(array.get(), np.full(1000, expected))
    if importlib.util.find_spec("torch"):
        import torch

        with torch.cuda.stream(torch.cuda.Stream()):
            tensor = torch.zeros(1000, device="cuda")
            torch.cuda._sleep(200_000_000)
            tensor += group.rank + 1
            group.all_reduce(tensor, "sum")
        np.testing.assert_array_equal(tensor.cpu().numpy(), np.full(1000, expected))


BODIES = [computes_what_numpy_computes, reduces_odd_layouts_and_nans, waits_for_whoever_made_the_data]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("nranks", NRANKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results(backend, nranks, body):
    enough_for(nranks, backend)
    if "pynccl" in backend and nranks > 2:
        pytest.skip("2 ranks tell one binding from the other")
    with RankProcesses(body, nranks, backend) as ranks:
        all_end_well(ranks)


@pytest.mark.parametrize("nranks", NRANKS)
def test_our_ring_has_the_bits_of_the_cpu_ring(nranks, monkeypatch):
    enough_for(nranks)
    monkeypatch.setenv("GRADSYNC_TEST_RENDEZVOUS", abstract_address("cpu"))
    with RankProcesses(gives_the_bits_of_a_cpu_ring, nranks, "nccl-ring") as ranks:
        all_end_well(ranks)


@pytest.mark.parametrize("backend", ["nccl", "nccl-ring"])
def test_one_rank_alone(backend):
    enough_for(1)
    import cupy

    with collective.connect(0, 1, backend=backend) as group:
        array = group.empty((3, 5))
        array[...] = cupy.asarray(sample(0, (3, 5), "float32"))
        group.all_reduce(array)
        group.barrier()
        assert_same_bits(array.get(), sample(0, (3, 5), "float32"))
    with collective.connect(0, 1, backend=backend, device="cpu") as group:
        assert type(group.empty(7)) is np.ndarray


def test_a_gpu_that_is_not_there():
    with pytest.raises(UsageError, match=f"there is no GPU 99: this process sees {GPUS}"):
        collective.connect(0, 1, backend="nccl", device="gpu:99")


# Faults


def reduces_for_ever(group):
    import cupy

    array = cupy.zeros(16_000_000, "f4")
    group.all_reduce(array, "sum")
    say(under_way=True)
    while True:
        group.all_reduce(array, "sum")


def reduces_for_ever_with_a_short_limit(group):
    limit_waits([group], LIMIT_S)
    reduces_for_ever(group)


def raises_on_rank_1(group):
    import cupy

    array = cupy.zeros(1_000_000, "f4")
    for step in range(10):
        if (group.rank, step) == (1, 3):
            raise ValueError("boom at step 3")
        group.all_reduce(array, "sum")


def ends_with(ranks, rank, limit):
    """How a survivor ended: what it raised; or, if NCCL held it, by its watchdog, of which only the exit code tells."""
    code = ranks.code(rank)
    try:
        end = ranks.hear(rank, "ended")
    except AssertionError:
        return "watchdog", code, time.monotonic()
    return f"{end['ended']}: {end['text']}", code, end["at"]


@pytest.mark.parametrize("backend", ["nccl", "nccl-ring"])
@pytest.mark.parametrize(
    ("body", "signalled", "error", "limit"),
    [
        (reduces_for_ever, signal.SIGKILL, "PeerLost: rank 1 died", 1.0),
        (reduces_for_ever_with_a_short_limit, signal.SIGSTOP, "PeerStalled: rank 1 did not take part", LIMIT_S + 1.0),
    ],
    ids=["killed", "frozen"],
)
def test_a_rank_that_dies_or_freezes_in_mid_all_reduce_ends_the_others(backend, body, signalled, error, limit):
    """With the error by `limit` seconds, or, if NCCL does not let go, by the watchdog's end of the process after it."""
    enough_for(3)
    with RankProcesses(body, 3, backend) as ranks:
        for rank in range(3):
            ranks.hear(rank, "under_way")
        at = ranks.signal(1, signalled)
        for rank in (0, 2):
            said, code, ended = ends_with(ranks, rank, limit)
            print(f"{backend}: rank {rank} ended {ended - at:.2f} s after {signalled.name} with {code}: {said}")
            assert code == 4
            assert said == "watchdog" or said.startswith(error)
            assert ended - at < limit + END_S + EXPLAIN_S


@pytest.mark.parametrize("backend", ["nccl", "nccl-ring"])
def test_a_rank_that_raises_fails_the_others_with_its_reason(backend):
    enough_for(2)
    with RankProcesses(raises_on_rank_1, 2, backend) as ranks:
        said, code, _ = ends_with(ranks, 0, 1.0)
        assert code == 4
        assert said in ("watchdog", "PeerLost: rank 1 left with ValueError: boom at step 3")


# Overhead


def compares_with_the_raw_call(group):
    """Rounds of raw calls and of ours in turn; the median over rounds of the difference of their medians."""
    import cupy

    array, communicator = group.empty(16_384), group._algorithm._nccl._comm
    array[...] = 0
    stream, where = cupy.cuda.Stream(non_blocking=True), array.data.ptr
    stream.synchronize()

    def raw():
        communicator.allReduce(where, where, array.size, 7, 0, stream.ptr)
        stream.synchronize()

    calls, rounds_timed = (CALLS, ROUNDS) if group.nranks <= GPUS else (20, 5)  # milliseconds each

    def seconds_of(call):
        taken = []
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
        return median(taken)

    cupy.cuda.Stream.null.synchronize()
    rounds = []
    for _ in range(rounds_timed + 2):
        rounds.append((seconds_of(raw), seconds_of(lambda: group.all_reduce(array, "sum"))))
        group.barrier()
    timed = rounds[2:]
    say(
        raw_us=1e6 * median(r for r, _ in timed),
        ours_us=1e6 * median(o for _, o in timed),
        overhead_us=1e6 * median(o - r for r, o in timed),
    )


@pytest.mark.parametrize("nranks", [1, 2])
def test_what_we_add_to_a_raw_call_of_64_kib(nranks):
    """With one rank there are no notes between ranks. Ranks that share a GPU take turns on it, milliseconds each, so
    their figure is printed but nothing is claimed by it."""
    enough_for(nranks)
    with RankProcesses(compares_with_the_raw_call, nranks, "nccl") as ranks:
        found = [ranks.hear(rank, "overhead_us") for rank in range(nranks)]
        all_end_well(ranks)
    print(json.dumps({"test": "overhead", "nranks": nranks, "gpus": GPUS, "ranks": found}))
    if nranks <= GPUS:
        assert max(each["overhead_us"] for each in found) <= OVERHEAD_US
