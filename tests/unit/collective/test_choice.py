"""Which backend and algorithm a group takes: every row of the table, and every pair that is refused."""

from __future__ import annotations

import pytest

from collective.choice import ALGORITHMS, BACKENDS, MeetingPlace, Topology, choose_backend, topology_of
from common.errors import UsageError

HERE, AWAY = MeetingPlace.of("unix-abstract:x"), MeetingPlace.of("10.0.0.1:8600")
SHM_AWAY = "backend shm needs all ranks on one host, the rendezvous is at 10.0.0.1; use tcp"
ONE_HOST, ALIKE, UNEQUAL, APART = ["a"] * 4, ["a", "a", "b", "b"], ["a", "a", "a", "b"], ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("backend", "algorithm", "device", "place", "taken"),
    [
        ("auto", "auto", "auto", HERE, "shm"),
        ("auto", "direct", "cpu", HERE, "shm"),
        ("auto", "ring", "cpu", HERE, "tcp"),
        ("auto", "auto", "auto", AWAY, "tcp"),
        ("auto", "hierarchical", "auto", AWAY, "tcp"),
        ("auto", "auto", "gpu:0", HERE, "nccl"),
        ("auto", "ring", "gpu:1", AWAY, "nccl"),
        ("shm", "auto", "auto", HERE, "shm"),
        ("tcp", "auto", "auto", HERE, "tcp"),
        ("nccl", "auto", "cpu", AWAY, "nccl"),
        ("nccl-ring", "ring", "gpu:0", HERE, "nccl-ring"),
    ],
)
def test_the_backend(backend: str, algorithm: str, device: str, place: MeetingPlace, taken: str) -> None:
    assert choose_backend(backend, algorithm, device, place) == taken


@pytest.mark.parametrize(
    ("backend", "algorithm", "device", "place", "why"),
    [
        (
            "shm",
            "auto",
            "auto",
            AWAY,
            "backend shm needs all ranks on one host, the rendezvous is at 10.0.0.1; use tcp",
        ),
        ("shm", "ring", "auto", HERE, "algorithm ring is for tcp and nccl (backend is shm); use direct"),
        (
            *("auto", "hierarchical", "auto", HERE),
            "algorithm hierarchical is for ranks of several hosts (backend is shm); use direct",
        ),
        (
            *("nccl", "direct", "auto", HERE),
            "algorithm direct is for the host's memory (backend is nccl); use auto or ring",
        ),
        (
            *("nccl-ring", "hierarchical", "auto", AWAY),
            "algorithm hierarchical is for the host's memory (backend is nccl-ring); use auto or ring",
        ),
        ("shm", "auto", "gpu:0", HERE, "backend shm works on the host's memory, not on gpu:0; use nccl or nccl-ring"),
        ("tcp", "ring", "gpu:3", AWAY, "backend tcp works on the host's memory, not on gpu:3; use nccl or nccl-ring"),
        ("tpc", "auto", "auto", HERE, f"unknown backend 'tpc'; did you mean 'tcp'? (known: {', '.join(BACKENDS)})"),
        ("tcp", "star", "auto", HERE, f"unknown algorithm 'star' (known: {', '.join(ALGORITHMS)})"),
    ],
)
def test_what_does_not_go_together(backend: str, algorithm: str, device: str, place: MeetingPlace, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_backend(backend, algorithm, device, place)
    assert str(caught.value) == why


@pytest.mark.parametrize(
    ("backend", "algorithm", "hosts", "taken"),
    [
        ("shm", "auto", ONE_HOST, Topology("direct", range(4))),
        ("shm", "direct", ONE_HOST, Topology("direct", range(4))),
        ("tcp", "auto", ONE_HOST, Topology("direct", (), [0, 1, 3])),
        ("tcp", "auto", APART, Topology("direct", (), [0, 1, 3])),
        ("tcp", "auto", UNEQUAL, Topology("direct", (), [0, 1, 3])),
        ("tcp", "auto", ALIKE, Topology("hierarchical", range(2, 4), [0])),
        ("tcp", "direct", ALIKE, Topology("direct", (), [0, 1, 3])),
        ("tcp", "ring", ALIKE, Topology("ring", (), [1, 3])),
        ("tcp", "hierarchical", ALIKE, Topology("hierarchical", range(2, 4), [0])),
        ("tcp", "hierarchical", APART, Topology("hierarchical", range(2, 3), [1, 3])),
        ("nccl", "auto", ONE_HOST, Topology("nccl", range(4))),
        ("nccl", "auto", ALIKE, Topology("nccl")),
        ("nccl", "ring", ONE_HOST, Topology("ring", range(4))),
        ("nccl-ring", "auto", APART, Topology("ring")),
        ("nccl-ring", "ring", ONE_HOST, Topology("ring", range(4))),
    ],
)
def test_the_algorithm_and_who_is_connected_with_rank_2(
    backend: str, algorithm: str, hosts: list[str], taken: Topology
) -> None:
    assert topology_of(backend, algorithm, 2, hosts) == taken


@pytest.mark.parametrize(
    ("rendezvous", "host", "local"),
    [
        ("127.0.0.1:8600", "127.0.0.1", True),
        ("localhost:1", "localhost", True),
        ("[::1]:8600", "::1", True),
        ("unix-abstract:ring", "unix-abstract", True),
        ("10.0.0.1:8600", "10.0.0.1", False),
        ("[fe80::1]:8600", "fe80::1", False),
    ],
)
def test_where_ranks_meet(rendezvous: str, host: str, local: bool) -> None:
    assert MeetingPlace.of(rendezvous) == MeetingPlace(host, local)
