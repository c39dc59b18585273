"""NCCL without a GPU: both bindings and all of our own logic over tests/support/fake_nccl.py."""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import collective
from collective.nccl import algorithm as nccl_algorithm
from collective.nccl import cuda
from collective.nccl import seat as nccl_group
from collective.nccl.algorithm import NcclAlgorithm
from collective.nccl.binding import BINDINGS, INSTALL, NcclBinding, load_binding, words
from collective.nccl.watchdog import Watchdog
from common.errors import GradSyncError, NcclFailed, PeerLost, PeerStalled, ProtocolError, UsageError
from common.launch.launch import abstract_address
from common.tensors.reduction import DTYPES, OPS
from tests.support.fake_nccl import FakeArray, FakeGpu, FakeNccl, make_binding, on_gpu
from tests.support.groups import (
    ROOT,
    assert_same_bits,
    cuts_of,
    errors_on,
    nccl_groups,
    on_ranks,
    on_threads,
    outcomes_of,
    reduced,
    sample,
)

CASES = [(dtype, op) for dtype in DTYPES for op in OPS if op != "mean" or dtype.startswith("float")]
SIZES = (0, 1, 15, 17, 96, 1009, 48_000)  # 96 and 48,000 give 2, 3 and 4 ranks chunks of one length
LIMIT_S = 0.3  # where a wait is to run out

bindings = pytest.mark.parametrize("binding", BINDINGS)
kinds = pytest.mark.parametrize("ring", [False, True], ids=["nccl", "nccl-ring"])


def closed_after(groups, body):
    try:
        return on_ranks(groups, body)
    finally:
        for group in groups:
            group.close()


def algorithms(groups):
    return [group._algorithm for group in groups]


# The contract of a binding


def joined(name, nranks, body):
    """What `body(binding, rank)` returns on each rank of a communicator."""
    nccl, identity = FakeNccl(), secrets.token_bytes(128)

    def rank_body(rank):
        binding = make_binding(name, nccl)
        binding.init(nranks, identity, rank)
        return body(binding, rank)

    return on_threads(nranks, rank_body)


@bindings
def test_an_id_is_128_bytes_zeros_included(binding):
    made = make_binding(binding, FakeNccl()).unique_id()
    assert (type(made), len(made)) == (bytes, 128)


@bindings
def test_the_version_is_the_librarys(binding):
    assert make_binding(binding, FakeNccl(22_809)).version == 22_809


@pytest.mark.parametrize(("number", "text"), [(23_007, "2.30.7"), (22_809, "2.28.9"), (2_708, "2.7.8")])
def test_versions_in_words(number, text):
    assert words(number) == text


@bindings
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_call_of_a_binding_does_what_its_name_says(binding, dtype):
    def body(nccl, rank):
        total, most = (on_gpu(np.full(5, rank + 1, dtype)) for _ in range(2))
        nccl.all_reduce(total, "sum", 7)
        nccl.all_reduce(most, "max", 7)
        at_root = on_gpu(np.full(5, rank + 1, dtype))
        nccl.reduce(at_root, "sum", 1, 7)
        parts, part = on_gpu(np.arange(6, dtype=dtype)), on_gpu(np.zeros(2, dtype))
        nccl.reduce_scatter(parts, part, "sum", 7)
        rows = on_gpu(np.zeros(6, dtype))
        nccl.all_gather(part, rows, 7)
        given = on_gpu(np.full(3, 10 + rank, dtype))
        nccl.broadcast(given, 2, 7)
        arrived = on_gpu(np.zeros(3, dtype))
        with nccl.grouped():
            nccl.send(on_gpu(np.full(3, rank, dtype)), (rank + 1) % 3, 7)
            nccl.recv(arrived, (rank - 1) % 3, 7)
        nccl.check()
        return [array.tolist() for array in (total, most, at_root, part, rows, given, arrived)]

    for rank, found in enumerate(joined(binding, 3, body)):
        at_root = [6] * 5 if rank == 1 else [rank + 1] * 5
        parts = [[0, 3], [6, 9], [12, 15]]
        expected = [[6] * 5, [3] * 5, at_root, parts[rank], sum(parts, []), [12] * 3, [(rank - 1) % 3] * 3]  # noqa: RUF017
        assert found == expected


@bindings
def test_an_error_in_the_background_is_found(binding):
    def body(nccl, rank):
        return nccl

    fake = FakeNccl()
    nccl = make_binding(binding, fake)
    nccl.init(1, secrets.token_bytes(128), 0)
    nccl.check()
    fake.communicators[0].asynchronous_error = "remote error"
    with pytest.raises(NcclFailed, match=r"NCCL 2.30.7 failed in the background: .*NCCL_DEBUG=WARN makes it say more"):
        nccl.check()


@bindings
def test_abort_and_destroy_reach_nccl_and_may_come_first_or_twice(binding):
    fake = FakeNccl()
    nccl = make_binding(binding, fake)
    nccl.abort()
    nccl.destroy()
    nccl.init(1, secrets.token_bytes(128), 0)
    nccl.abort()
    assert fake.communicators[0].aborted
    nccl.init(1, secrets.token_bytes(128), 0)
    nccl.destroy()
    nccl.destroy()
    assert fake.communicators[0].destroyed


def test_what_nccl_refuses_is_translated_once():
    fake = FakeNccl()
    nccl = make_binding("cupy", fake)
    nccl.init(1, secrets.token_bytes(128), 0)

    def refuse(*arguments):
        raise fake.NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")

    fake.communicators[0].allReduce = refuse
    with pytest.raises(NcclFailed) as caught:
        nccl.all_reduce(on_gpu(np.ones(3, "f4")), "sum", 7)
    assert str(caught.value) == (
        "NCCL 2.30.7 failed in AllReduce: NCCL_ERROR_INVALID_USAGE: invalid usage; NCCL_DEBUG=WARN makes it say more"
    )
    assert isinstance(caught.value.__cause__, fake.NcclError)


def test_pynccl_counts_in_32_bits():
    nccl = make_binding("pynccl", FakeNccl())
    many = SimpleNamespace(size=2**31, dtype=np.dtype("f4"), data=SimpleNamespace(ptr=0))
    with pytest.raises(
        ValueError, match=r"pynccl moves at most 2,147,483,647 elements in one call \(got 2,147,483,648\)"
    ):
        nccl.all_reduce(many, "sum", 7)
    with pytest.raises(ValueError, match="use --nccl-binding cupy, or smaller arrays"):
        nccl.send(many, 0, 7)


def test_before_cupy_14_an_id_is_a_tuple_of_signed_numbers():
    seen = []

    class OldNccl:
        NcclError = RuntimeError

        def get_version(self):
            return 21_805

        def get_unique_id(self):
            return (-1, 0, 127, -128)

        def NcclCommunicator(self, *arguments):  # noqa: N802
            seen.append(arguments)

    nccl = collective.nccl.binding.CupyBinding(OldNccl(), ids_are_bytes=False)
    assert nccl.unique_id() == bytes([255, 0, 127, 128])
    nccl.init(2, nccl.unique_id(), 1)
    assert seen == [(2, (-1, 0, 127, -128), 1)]


# What is not installed


def test_each_missing_part_is_one_line(monkeypatch):
    with pytest.raises(UsageError, match="unknown NCCL binding 'cpy'; did you mean 'cupy'"):
        load_binding("cpy")

    def without(name):
        def load(wanted):
            if wanted.startswith(name):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return SimpleNamespace(__version__="14.2.0", available=False)

        return load

    for binding, missing in (("cupy", "cupy"), ("pynccl", "pynccl"), ("pynccl", "numba")):
        monkeypatch.setattr(importlib, "import_module", without(missing if missing != "numba" else "pynccl"))
        with pytest.raises(UsageError) as caught:
            load_binding(binding)
        assert str(caught.value).startswith(f"NCCL through {binding} needs {caught.value.__cause__.name}, which is not")
        assert str(caught.value).endswith(INSTALL)
    monkeypatch.setattr(importlib, "import_module", without("nothing"))
    with pytest.raises(UsageError, match=r"CuPy finds no NCCL library \(libnccl.so.2\); pip install"):
        load_binding("cupy")


def test_pynccl_without_a_library_says_which_variable_helps(monkeypatch):
    def libnccl():
        raise Exception("Cannot open library for nccl:\nlibrary nccl not found")

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(libnccl=libnccl))
    with pytest.raises(
        UsageError, match=r"pynccl cannot load NCCL \(Cannot open library for nccl:\); NUMBA_NCCLLIB names"
    ):
        load_binding("pynccl")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "NCCL needs CuPy, which is not installed; pip install cupy-cuda12x"),
        ("cupy", "NCCL needs a CUDA GPU, and CuPy sees none; look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_machine_without_gpu_or_cupy_says_so(monkeypatch, found, text):
    monkeypatch.setattr(cuda, "count_gpus", lambda: 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(UsageError) as caught:
        cuda.pick_gpu("auto", 0)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("device", "rank", "environment", "index"),
    [
        ("auto", 0, {}, 0),
        ("cpu", 3, {}, 1),
        ("auto", 3, {"PADDLE_LOCAL_RANK": "0"}, 0),
        ("auto", 0, {"FLAGS_selected_gpus": "1", "PADDLE_LOCAL_RANK": "0"}, 1),
        ("gpu:1", 0, {"FLAGS_selected_gpus": "0"}, 1),
    ],
)
def test_which_gpu_is_a_ranks(monkeypatch, device, rank, environment, index):
    for name in ("PADDLE_LOCAL_RANK", "FLAGS_selected_gpus"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda, "count_gpus", lambda: 2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert cuda.pick_gpu(device, rank) == index
    with pytest.raises(UsageError, match="there is no GPU 2: this process sees 2, numbered from 0"):
        cuda.pick_gpu("gpu:2", 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"backend": "shm", "device": "gpu:0"}, "backend shm works on the host's memory, not on gpu:0; use nccl"),
        ({"backend": "tcp", "device": "gpu:0"}, "backend tcp works on the host's memory"),
        ({"device": "gpu"}, "unknown device 'gpu'; expected auto, cpu or gpu:K, as in gpu:0"),
        ({"backend": "nccl", "algorithm": "direct"}, "algorithm direct is for the host's memory"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, text):
    with pytest.raises(UsageError, match=text):
        collective.connect(0, 2, **arguments)


@pytest.mark.skipif(cuda.count_gpus() > 0, reason="this machine has a GPU")
@pytest.mark.parametrize("backend", ["nccl", "nccl-ring"])
def test_the_launcher_refuses_in_one_line(backend):
    done = subprocess.run(
        [sys.executable, "-m", "collective.run", "--backend", backend],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "UsageError: " in done.stderr
    assert ("pip install cupy-cuda12x" in done.stderr) or ("CuPy sees none" in done.stderr)


# connect, with the fakes in place of CuPy


@pytest.fixture
def fake_cuda(monkeypatch):
    """Every seat gets a GPU of its own, as far as it knows, and all the same NCCL."""
    fake = FakeNccl()

    def make_gpu(index):
        gpu = FakeGpu()
        gpu.identity = f"host {index}"
        return gpu

    monkeypatch.setattr(nccl_group, "load_binding", lambda name: make_binding(name, fake))
    monkeypatch.setattr(nccl_group, "Gpu", make_gpu)
    monkeypatch.setattr(cuda, "count_gpus", lambda: 2)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(NcclAlgorithm.__init__.__kwdefaults__, "end", fake.interrupt_all)
    for name in ("NCCL_SOCKET_IFNAME", *nccl_group.SHARING):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return fake


@bindings
@pytest.mark.parametrize("nranks", [1, 2])
@pytest.mark.parametrize(("backend", "device"), [("nccl", "auto"), ("nccl-ring", "auto"), ("auto", "gpu:%d")])
def test_connect_brings_a_group_together(fake_cuda, backend, device, nranks, binding):
    rendezvous = abstract_address("test")

    def body(rank):
        chosen = device % rank if "%" in device else device
        with collective.connect(rank, nranks, rendezvous, backend, device=chosen, nccl_binding=binding) as group:
            array = group.empty(1000)
            assert type(array) is FakeArray
            array[...] = sample(rank, 1000, "float32")
            group.all_reduce(array)
            return group.backend, group.algorithm, np.asarray(array)

    expected = reduced([sample(rank, 1000, "float32") for rank in range(nranks)], "mean") if nranks > 1 else None
    for found in on_threads(nranks, body):
        assert found[:2] == (("nccl-ring", "ring") if backend == "nccl-ring" else ("nccl", "nccl"))
        if expected is not None:
            np.testing.assert_allclose(found[2], expected, rtol=1e-3)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"  # NCCL listens to this host only
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ


def test_on_the_host_empty_gives_pinned_memory(fake_cuda):
    with collective.connect(0, 1, backend="nccl", device="cpu") as group:
        array = group.empty((3, 5), "float64")
        assert (type(array), array.shape, array.dtype) == (np.ndarray, (3, 5), np.float64)
        assert group._algorithm._gpu.is_pinned(array)


def share_a_gpu(fake):
    rendezvous = abstract_address("test")

    def body(rank):
        with collective.connect(rank, 3, rendezvous, "nccl", timeout=10) as group:
            group.barrier()

    return [outcome.error for outcome in outcomes_of(3, body)]


def test_ranks_that_share_a_gpu_tell_nccl_before_it_starts(fake_cuda):
    assert share_a_gpu(fake_cuda) == [None] * 3  # ranks 0 and 2 of 3 on 2 GPUs
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert os.environ["NCCL_MAX_CTAS"] == "4"


def test_an_older_nccl_does_not_let_ranks_share(fake_cuda):
    fake_cuda.version = 22_809
    errors = share_a_gpu(fake_cuda)
    assert {str(error) for error in errors} == {
        "ranks 0 and 2 share a GPU, which NCCL 2.28.9 refuses; give each rank its own GPU, "
        "or pip install 'nvidia-nccl-cu12>=2.30' (CUDA 13: -cu13)"
    }
    assert {type(error) for error in errors} == {UsageError}
    assert not fake_cuda.communicators


@pytest.mark.parametrize(("gpus", "text"), [(2, ""), (1, "1 GPU for 2 ranks"), (0, "no GPU for 2 ranks")])
def test_whether_there_are_gpus_enough(fake_cuda, monkeypatch, gpus, text):
    monkeypatch.setattr(nccl_group, "count_gpus", lambda: gpus)
    assert nccl_group.gpus_for(2, "cupy") == text


@pytest.mark.parametrize(
    ("missing", "backend", "said"),
    [
        ("", "nccl", "backend nccl: a GPU for each of 2 ranks\n"),
        ("1 GPU for 2 ranks", "auto", "backend shm, not nccl: 1 GPU for 2 ranks\n"),
        ("no GPU for 2 ranks", "auto", ""),
    ],
)
def test_auto_uses_nccl_where_there_are_gpus_enough_and_says_so(monkeypatch, capsys, missing, backend, said):
    from collective import run
    from collective.config import CollectiveRunConfig

    monkeypatch.setattr(run, "gpus_for", lambda ranks, binding: missing)
    node = SimpleNamespace(nnodes=1, ranks=range(2))
    assert run.choose_backend(CollectiveRunConfig(), node) == backend
    assert capsys.readouterr().out == said
    assert run.choose_backend(CollectiveRunConfig(backend="tcp"), node) == "tcp"
    assert run.choose_backend(CollectiveRunConfig(), SimpleNamespace(nnodes=2)) == "auto"


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


# What goes wrong


@kinds
def test_calls_that_differ_are_found_although_nccl_would_not(ring):
    """A sum on one rank and a maximum on the other: NCCL itself would go through with it."""
    errors = errors_on(
        nccl_groups(2, ring=ring), lambda group: group.all_reduce(on_gpu(np.ones(64, "f4")), ["sum", "max"][group.rank])
    )
    assert any(isinstance(error, ProtocolError) for error in errors)
    assert all(isinstance(error, (ProtocolError, PeerLost)) for error in errors)


def stuck(group, seconds=LIMIT_S):
    """The group's GPU never comes to an end, and the wait for it runs out soon."""
    group._algorithm._gpu.stuck = True
    group._algorithm._mesh.timeout = seconds


def test_a_gpu_that_never_ends_although_all_ranks_wait_is_nccls_fault():
    fake = FakeNccl()
    groups = nccl_groups(2, ring=False, nccl=fake)
    for group in groups:
        stuck(group)
    begin = time.monotonic()
    errors = errors_on(groups, lambda group: group.all_reduce(on_gpu(np.ones(64, "f4"))))
    assert time.monotonic() - begin < LIMIT_S + 5
    failed = [str(error) for error in errors if isinstance(error, NcclFailed)]
    assert failed
    assert "NCCL did not finish all_reduce within 0.3 s although every rank waits for it (this is rank" in failed[0]
    assert all(fake.communicators[rank].aborted for rank in range(2))


def test_a_rank_that_does_not_come_is_stalled():
    """The other one is inside NCCL, so it is the watchdog that finds out."""
    groups = nccl_groups(2, ring=False)
    stuck(groups[0])

    def body(rank):
        if rank == 0:
            with groups[0] as group:
                group.all_reduce(on_gpu(np.ones(64, "f4")))

    outcomes = outcomes_of(2, body)
    groups[1].close()
    error = outcomes[0].error
    assert type(error) is PeerStalled
    assert str(error).startswith("rank 1 did not take part for 0.3 s (rank 0 was in all_reduce)")


@pytest.mark.parametrize("reason", ["", "ValueError: boom"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside NCCL", "waiting for the GPU"])
def test_a_rank_that_leaves_is_named_within_a_second_or_two(reason, inside):
    groups = nccl_groups(2, ring=False)
    if not inside:
        groups[0]._algorithm._nccl.all_reduce = lambda *arguments: None
        groups[0]._algorithm._gpu.stuck = True
    begin = time.monotonic()

    def body(rank):
        with groups[rank] as group:
            if rank == 0:
                group.all_reduce(on_gpu(np.ones(64, "f4")))
            else:
                group.close(reason)

    error = outcomes_of(2, body)[0].error
    assert time.monotonic() - begin < nccl_algorithm.EXPLAIN_S + 2
    assert type(error) is PeerLost
    expected = f"rank 1 left with {reason}" if reason else "rank 1 finished while rank 0 was still in"
    assert str(error).startswith(expected)


def test_an_error_in_the_background_ends_the_wait(monkeypatch):
    monkeypatch.setattr(nccl_algorithm, "EXPLAIN_S", 0.1)
    fake = FakeNccl()
    (group,) = nccl_groups(1, ring=False, nccl=fake)
    group._algorithm._gpu.stuck = True
    fake.communicators[0].asynchronous_error = "unhandled system error"
    with group, pytest.raises(NcclFailed, match="failed in the background: unhandled system error"):
        group.all_reduce(on_gpu(np.ones(3, "f4")))
    assert fake.communicators[0].aborted


def test_an_error_of_nccls_that_a_death_explains_is_that_death():
    """Although the mesh learns of the death a moment later than NCCL."""
    fake = FakeNccl()
    groups = nccl_groups(2, ring=False, nccl=fake)

    def die():
        for peer in groups[1]._algorithm._mesh.peers.values():
            peer.connection.close()

    dying = threading.Timer(0.2, die)

    def fail(*arguments):
        dying.start()
        raise NcclFailed("remote process exited")

    groups[0]._algorithm._nccl.all_reduce = fail
    with pytest.raises(PeerLost, match="rank 1 died: its connection closed without a goodbye"):
        groups[0].all_reduce(on_gpu(np.ones(3, "f4")))
    dying.join()
    followed = groups[0]._algorithm._gpu.followed
    with pytest.raises(PeerLost):  # and so for every later call, which goes no further
        groups[0].all_reduce(on_gpu(np.ones(3, "f4")))
    assert groups[0]._algorithm._gpu.followed == followed
    for group in groups:
        group.close()


def test_a_group_that_does_not_come_together_in_nccl_is_given_up():
    ended = []

    class LonelyNccl(NcclBinding):
        name, version, most_elements = "lonely", 23007, 1

        def init(self, nranks, unique_id, rank):
            deadline = time.monotonic() + 20
            while not ended and time.monotonic() < deadline:
                time.sleep(0.01)
            raise NcclFailed("aborted")

        def abort(self):
            pass

        unique_id = group_start = group_end = check = destroy = _enqueue = abort

    from collective.transports.mesh import Mesh

    with pytest.raises(NcclFailed):
        NcclAlgorithm(LonelyNccl(), FakeGpu(), Mesh(0, {}, timeout=LIMIT_S), 1, b"", end=ended.append)
    assert str(ended[0]).startswith("NCCL did not finish initialisation within 0.3 s although every rank waits for it")


# The watchdog


def test_the_watchdog_looks_only_while_a_call_lasts_and_ends_once(wait_until):
    looks, ended = [], []

    def look(doing, waited):
        looks.append((doing, waited))
        if waited > 0.1:
            raise PeerLost("rank 1 died")

    watchdog = Watchdog(look, ended.append)
    try:
        with watchdog.over("broadcast"):
            wait_until(lambda: ended)
        count = len(looks)
        with watchdog.over("another"):
            pass
        assert (str(ended[0]), len(ended)) == ("rank 1 died", 1)
        assert {doing for doing, _ in looks} == {"broadcast"}
        assert len(looks) == count
    finally:
        watchdog.close()


def test_the_end_is_one_line_and_the_errors_exit_code():
    code = (
        "from collective.nccl.watchdog import Watchdog, end_process\n"
        "from common.errors import PeerLost\n"
        "import time\n"
        "def look(doing, waited): raise PeerLost('rank 1 died: its connection closed without a goodbye')\n"
        "with Watchdog(look, end_process).over('all_reduce'):\n"
        "    time.sleep(30)"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - begin < 20
    assert done.returncode == PeerLost.exit_code
    assert done.stderr == (
        "PeerLost: rank 1 died: its connection closed without a goodbye; NCCL holds this process, so it ends\n"
    )


@pytest.mark.parametrize("leave", ["abort", "destroy"])
def test_leaving_that_hangs_is_given_up_with_the_error(monkeypatch, leave):
    monkeypatch.setattr(nccl_algorithm, "END_S", 0.2)
    ended = []
    fake = FakeNccl()
    (group,) = nccl_groups(1, ring=False, nccl=fake)
    algorithm = group._algorithm
    algorithm._end = ended.append

    def hang():
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)

    setattr(algorithm._nccl, leave, hang)
    if leave == "abort":
        fake.communicators[0].asynchronous_error = "unhandled system error"
        algorithm._gpu.stuck = True
        monkeypatch.setattr(nccl_algorithm, "EXPLAIN_S", 0.1)
        with pytest.raises(NcclFailed):
            group.all_reduce(on_gpu(np.ones(3, "f4")))
        assert "unhandled system error" in str(ended[0])
        algorithm._nccl.abort = lambda: None
    group.close()
    if leave == "destroy":
        assert str(ended[0]) == "rank 0 could not leave NCCL within 0.2 s"
    assert all(isinstance(error, GradSyncError) for error in ended)
