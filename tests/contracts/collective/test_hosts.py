"""Which algorithm serves which topology of hosts and length of arrays."""

from __future__ import annotations

import pytest

import collective
from collective.algorithms.by_size import SHORT_BYTES
from collective.choice import MOST_DIRECT, topology_of
from common.errors import PeerError, ProtocolError, UsageError
from tests.support.collectives import ones
from tests.support.groups import assert_same_bits, errors_on, opened, reduced, sample


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
    topology = topology_of("tcp", "auto", 3, list(hosts))
    assert (topology.algorithm, [*topology.local], [*topology.linked]) == (algorithm, local, linked)


def test_many_ranks_have_data_connections_with_two_only():
    """Unless they are asked for."""
    hosts = [""] * (MOST_DIRECT + 1)
    few, many = topology_of("tcp", "auto", 3, hosts[1:]), topology_of("tcp", "auto", 3, hosts)
    assert (few.algorithm, len(few.linked)) == ("direct", MOST_DIRECT - 1)
    assert (many.algorithm, [*many.linked]) == ("ring", [2, 4])
    assert len(topology_of("tcp", "direct", 3, hosts).linked) == MOST_DIRECT
    assert topology_of("tcp", "ring", 0, [""] * 4).linked == [1, 3]


@pytest.mark.parametrize(("hosts", "counts"), [("aaaa", "4"), ("aab", "2, 1"), ("abab", "2, 2")])
def test_a_hierarchy_that_does_not_fit_is_refused(hosts, counts):
    with pytest.raises(UsageError) as caught:
        topology_of("tcp", "hierarchical", 1, list(hosts))
    assert str(caught.value) == (
        "algorithm hierarchical needs two or more hosts with equally many ranks, numbered host by host "
        f"(ranks on each host here: {counts}); use direct"
    )
    with pytest.raises(UsageError, match=r"algorithm hierarchical is for ranks of several hosts \(backend is shm\)"):
        collective.connect(0, 2, algorithm="hierarchical")
    with pytest.raises(UsageError, match=r"algorithm ring is for tcp and nccl \(backend is shm\); use direct"):
        collective.connect(0, 2, backend="shm", algorithm="ring")


@pytest.mark.parametrize("nranks", [2, 3])
def test_over_tcp_short_and_long_arrays_agree(groups, nranks):
    """One goes straight to its reducers, the other round the ring."""
    limit = SHORT_BYTES // nranks // 4

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
        group.all_reduce(ones(SHORT_BYTES // 3 // 4 + (group.rank == 1)), "sum")

    with opened("tcp", 3) as every:
        errors = errors_on(every, body)
    assert all(isinstance(error, (ProtocolError, PeerError)) for error in errors), errors
    assert any(isinstance(error, ProtocolError) for error in errors)
