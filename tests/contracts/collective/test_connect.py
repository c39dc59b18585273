"""How ranks meet, and what `connect` refuses."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

import collective
from collective import group
from collective.build import build
from collective.choice import ALGORITHMS
from collective.choice import BACKENDS as CONNECT_BACKENDS
from common.errors import PeerUnreachable, PortInUse, RendezvousError, UsageError
from common.launch.ranks import abstract_address
from tests.support.groups import assert_same_bits, free_port, on_threads, outcomes_of, sample

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
        ("auto", "ring", "ring"),
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
        assert "ranks disagree on the backend: shm, tcp with algorithm ring" in str(error)


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


def test_a_rank_that_cannot_build_its_group_tells_why(monkeypatch):
    """Its process may go on: nobody would notice by its end."""

    def build_but_on_rank_1(backend, topology, mesh, *rest, **options):
        if mesh.rank == 1:
            raise ValueError("no memory")
        return build(backend, topology, mesh, *rest, **options)

    monkeypatch.setattr(group, "build", build_but_on_rank_1)
    place = abstract_address("test")
    errors = [each.error for each in outcomes_of(2, lambda rank: collective.connect(rank, 2, place, "shm"))]
    assert str(errors[0]) == "rank 1 left with ValueError: no memory"
    assert str(errors[1]) == "no memory"
