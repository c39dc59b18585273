"""`connect` over NCCL, with the fakes in place of CuPy."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

import collective
from collective.nccl import cuda
from collective.nccl import seat as nccl_group
from collective.nccl.algorithm import NcclAlgorithm
from common.errors import UsageError
from common.launch.ranks import abstract_address
from tests.support.fake_nccl import FakeArray, FakeGpu, FakeNccl, make_binding
from tests.support.groups import on_threads, outcomes_of, reduced, sample
from tests.support.nccl_cases import bindings

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
            if nranks == 2:  # messages of the host's do not pass NCCL
                group.messenger.send(1 - rank, 3, b"from %d" % rank)
                assert group.messenger.receive(1 - rank, 3) == b"from %d" % (1 - rank)
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
    from collective.command_flags import CollectiveRunConfig

    monkeypatch.setattr(run, "gpus_for", lambda ranks, binding: missing)
    node = SimpleNamespace(nnodes=1, ranks=range(2))
    assert run.backend_here(CollectiveRunConfig(), node) == backend
    assert capsys.readouterr().out == said
    assert run.backend_here(CollectiveRunConfig(backend="tcp"), node) == "tcp"
    assert run.backend_here(CollectiveRunConfig(), SimpleNamespace(nnodes=2)) == "auto"
