"""Both bindings of NCCL over tests/support/fake_nccl.py keep one contract."""

from __future__ import annotations

import secrets
from types import SimpleNamespace

import numpy as np
import pytest

import collective
from collective.nccl.binding import words
from common.errors import NcclFailed
from common.tensors.reduction import DTYPES
from tests.support.fake_nccl import FakeNccl, make_binding, on_gpu
from tests.support.groups import on_threads
from tests.support.nccl_cases import bindings


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
