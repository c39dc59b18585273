"""python -m benchmarks scale: a group is started and one of its ranks killed; larger ones are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.running import Process
from benchmarks.records.result_files import read
from benchmarks.records.scale import ScaleResults
from benchmarks.scale.counts import at_start
from benchmarks.scale.group import failure_in, until_all
from benchmarks.verbs.scale import ScaleConfig, scale
from common.errors import GradSyncError, UsageError


@pytest.mark.long
@pytest.mark.processes
def test_a_small_group_is_started_and_all_name_the_rank_that_is_killed(tmp_path: Path) -> None:
    assert scale(ScaleConfig(ranks="3", backends="shm", out=tmp_path)) == 0
    results = read(tmp_path / "scale.json")
    assert isinstance(results, ScaleResults)
    (group,) = results.groups
    assert (group.nranks, group.named) == (3, 2)
    assert group.sockets[1] >= 2
    assert group.threads[1] >= 2
    assert "3 ranks over shm" in (tmp_path / "scale.md").read_text()
    assert [each.nranks for each in results.at_start] == [16, 64, 256, 1024, 4096]


def test_connections_grow_by_the_logarithm_and_joins_by_the_number_of_ranks() -> None:
    few, many = at_start(16), at_start(1024)
    assert (few.joins, few.connections_shm, few.connections_tcp, few.steps) == (15, 15, 30, 1)
    assert (many.joins, many.connections_shm, many.connections_tcp, many.steps) == (1023, 19, 21, 5)
    assert many.all_with_all == 2046
    assert many.passed_on == 10


def test_when_and_in_which_words_a_rank_failed() -> None:
    assert failure_in("failed PeerLost 12.500: rank 3 died: its connection") == (12.5, "rank 3 died: its connection")


def test_a_rank_that_ends_too_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    process = Process("rank 4", tmp_path / "4", ["sh", "-c", "echo imported; echo no such host"], {})
    try:
        assert until_all([process], "imported", 10) == ["imported"]
        with pytest.raises(GradSyncError, match=r"rank 4 ended: no 'complete', its last words: \['no such host'\]"):
            until_all([process], "complete", 10)
    finally:
        process.end()


@pytest.mark.parametrize("ranks", ["2", "64,x", ""])
def test_ranks_must_be_numbers(ranks: str) -> None:
    with pytest.raises(UsageError, match=f"--ranks must be numbers of at least 3, separated by commas .got {ranks}"):
        ScaleConfig(ranks=ranks)
