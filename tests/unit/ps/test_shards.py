"""Which server owns what: literal tables, and what must hold for every length and number of servers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from common.tensors.buckets import Bucket
from ps.store.shards import Shard, parse_shard, plan_shards, shard_of_bucket

LENGTHS = st.integers(0, 5000)
SERVERS = st.integers(1, 40)


@pytest.mark.parametrize(
    ("length", "servers", "cuts"),
    [
        (0, 1, [0, 0]),
        (0, 3, [0, 0, 0, 0]),
        (1, 1, [0, 1]),
        (1, 2, [0, 1, 1]),
        (16, 2, [0, 16, 16]),
        (17, 2, [0, 16, 17]),
        (32, 2, [0, 16, 32]),
        (100, 1, [0, 100]),
        (100, 2, [0, 64, 100]),
        (100, 3, [0, 48, 80, 100]),
        (64, 4, [0, 16, 32, 48, 64]),
        (33, 5, [0, 16, 32, 32, 33, 33]),
    ],
)
def test_the_plan_is_this_table(length: int, servers: int, cuts: list[int]) -> None:
    expected = tuple(Shard(cuts[i], cuts[i + 1]) for i in range(servers))
    assert plan_shards(length, servers) == expected


@given(LENGTHS, SERVERS)
def test_shards_cover_the_arena_without_gap_or_overlap(length: int, servers: int) -> None:
    plan = plan_shards(length, servers)
    assert len(plan) == servers
    assert [i for shard in plan for i in range(shard.start, shard.stop)] == list(range(length))


@given(LENGTHS, SERVERS)
def test_shards_are_cut_at_cache_lines(length: int, servers: int) -> None:
    assert all(shard.start % 16 == 0 or shard.start == length for shard in plan_shards(length, servers))


@given(LENGTHS, SERVERS)
def test_shards_are_balanced_within_a_cache_line(length: int, servers: int) -> None:
    lines = [-(-shard.length // 16) for shard in plan_shards(length, servers)]
    assert max(lines) - min(lines) <= 1


@given(LENGTHS, SERVERS)
def test_more_servers_than_lines_leave_some_without_a_slice(length: int, servers: int) -> None:
    lines = -(-length // 16)
    with_a_slice = sum(shard.length > 0 for shard in plan_shards(length, servers))
    assert with_a_slice == min(servers, lines)


@pytest.mark.parametrize(
    ("bucket", "part"),
    [
        (Bucket(0, 200), (32, 96)),
        (Bucket(32, 96), (32, 96)),
        (Bucket(40, 50), (40, 50)),
        (Bucket(0, 40), (32, 40)),
        (Bucket(90, 120), (90, 96)),
        (Bucket(0, 32), None),
        (Bucket(96, 120), None),
        (Bucket(0, 10), None),
        (Bucket(150, 160), None),
    ],
)
def test_the_part_of_a_bucket_in_a_shard(bucket: Bucket, part: tuple[int, int] | None) -> None:
    found = shard_of_bucket(Shard(32, 96), bucket)
    assert found.length == 0 if part is None else found == Shard(*part)


@given(LENGTHS, SERVERS, st.lists(st.integers(0, 5000), max_size=6))
def test_parts_of_all_buckets_cover_every_shard_once(length: int, servers: int, cuts: list[int]) -> None:
    edges = sorted({0, length, *(c for c in cuts if c < length)})
    buckets = [Bucket(a, b) for a, b in pairwise(edges)]
    for shard in plan_shards(length, servers):
        parts = [shard_of_bucket(shard, bucket) for bucket in buckets]
        assert all(part.length >= 0 for part in parts)
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(shard.start, shard.stop))


@pytest.mark.parametrize(("text", "parsed"), [("0/1", (0, 1)), ("0/2", (0, 2)), ("1/2", (1, 2)), ("11/12", (11, 12))])
def test_parse_shard(text: str, parsed: tuple[int, int]) -> None:
    assert parse_shard(text) == parsed


@pytest.mark.parametrize(
    "text", ["", "0", "/", "1/", "/2", "2/2", "3/2", "0/0", "-1/2", "a/2", "0/b", "0/1/2", "0.0/1"]
)
def test_what_is_no_shard_is_named_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shard(text)
    assert repr(text) in str(caught.value)
    assert "--shard must be I/S" in str(caught.value)
    assert "0/2" in str(caught.value)
