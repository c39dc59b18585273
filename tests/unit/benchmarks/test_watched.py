"""Who straggles when, by how much, and what is kept of the parameters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.training.watched import Straggler, Watch, Watched
from common.sync.local import LocalSynchronizer
from common.tensors.arena import Arena, Layout


class Clock:
    """A clock that only moves when told, and a sleep that moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Inner(LocalSynchronizer):
    """Notes when buckets are final; its every wait takes 7 s, and its every step adds 1 to the parameters."""

    def __init__(self, clock: Clock, rank: int = 0, nranks: int = 1) -> None:
        self.clock, self.rank, self.nranks = clock, rank, nranks
        self.final: list[tuple[int, float]] = []
        self.settles_by = 0.0
        self.backend = "none yet"

    def attach(self, arena: Arena, optimizer: Any) -> None:
        self.clock.now += 7
        self.arena, self.backend = arena, "known"

    def mark_ready(self, bucket: int) -> None:
        self.final.append((bucket, self.clock.now))

    def finish(self, learning_rate: float) -> None:
        self.clock.now += 7
        self.arena.parameters += 1

    def settle(self) -> None:
        self.clock.now += 7
        self.arena.parameters += self.settles_by

    def all_gather(self, values: Any) -> Any:
        self.clock.now += 7
        return np.stack([values] * self.nranks)


def watched(inner: Inner, straggler: Straggler, *, every: int = 2, file: Path = Path("unused")) -> Watched:
    found = Watched(inner, Watch(straggler, every, file), clock=inner.clock, sleep=inner.clock.sleep)
    found.attach(Arena(Layout.of([("weight", (3,))])), None)
    found.all_gather(np.zeros(1))
    return found


@given(
    factor=st.floats(1, 10),
    steps=st.lists(st.lists(st.floats(0, 5), min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_gradients_of_a_slow_rank_are_late_by_the_factor(factor: float, steps: list[list[float]]) -> None:
    """Whatever it computes between two buckets takes so many times as long; what it waits does not."""
    inner = Inner(Clock())
    slow = watched(inner, Straggler("permanent", factor))
    for pieces in steps:
        begun = inner.clock.now
        for bucket, seconds in enumerate(pieces):
            inner.clock.now += seconds
            slow.mark_ready(bucket)
            assert inner.final[-1] == (bucket, pytest.approx(begun + factor * sum(pieces[: bucket + 1])))
        slow.finish(0.1)


@pytest.mark.parametrize(("kind", "rank"), [("none", 0), ("none", 3), ("permanent", 0), ("permanent", 2)])
def test_others_are_not_slowed(kind: str, rank: int) -> None:
    inner = Inner(Clock(), rank, nranks=4)
    free = watched(inner, Straggler(kind, 3.0))
    begun = inner.clock.now
    inner.clock.now += 2
    free.mark_ready(0)
    assert inner.final == [(0, begun + 2)]


def test_the_permanent_straggler_is_the_last_rank_which_nobody_watches() -> None:
    assert {Straggler("permanent", 3.0).slow_rank(step, 4) for step in range(9)} == {3}
    assert {Straggler().slow_rank(step, 4) for step in range(9)} == {None}


def test_the_random_straggler_is_drawn_anew_for_each_step_and_the_same_on_all_ranks() -> None:
    draws = [[Straggler("random", 3.0, seed).slow_rank(step, 4) for step in range(400)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    for counts in map(Counter, draws):
        assert set(counts) == {0, 1, 2, 3}
        assert min(counts.values()) > 60


def test_the_random_straggler_sleeps_at_its_own_steps_only() -> None:
    straggler = Straggler("random", 2.0, seed=5)
    inner = Inner(Clock(), rank=1, nranks=2)
    both = watched(inner, straggler)
    for step in range(20):
        begun = inner.clock.now
        inner.clock.now += 1
        both.mark_ready(0)
        assert inner.final[-1][1] - begun == (2 if straggler.slow_rank(step, 2) == 1 else 1)
        both.finish(0.1)


@pytest.mark.parametrize(
    ("steps", "settles_by", "kept", "later"),
    [
        (5, 0, [2, 4, 5], [0, 0, 7]),  # the last step's are kept though no evaluation was due
        (4, 0, [2, 4], [0, 0]),  # settling changed nothing
        (4, 0.5, [2, 4, 4], [0, 0, 7]),
        (1, 0, [1], [7]),
    ],
)
def test_parameters_are_kept_as_they_were(
    tmp_path: Path, steps: int, settles_by: float, kept: list[int], later: list[float]
) -> None:
    inner = Inner(Clock())
    inner.settles_by = settles_by
    each = watched(inner, Straggler(), file=tmp_path / "kept.npz")
    for _ in range(steps):
        each.finish(0.1)
    each.settle()
    inner.arena.parameters[:] = -1  # what was kept are copies
    each.save()
    with np.load(tmp_path / "kept.npz", allow_pickle=False) as stored:
        assert stored["steps"].tolist() == kept
        assert stored["later"].tolist() == later
        expected = [*map(float, kept[:-1]), kept[-1] + settles_by]
        np.testing.assert_array_equal(stored["parameters"][:, 0], expected)
        assert stored["parameters"].dtype == np.float32


def test_only_rank_0_keeps_and_writes(tmp_path: Path) -> None:
    other = watched(Inner(Clock(), 1, 2), Straggler(), file=tmp_path / "kept.npz")
    other.finish(0.1)
    other.finish(0.1)
    other.settle()
    other.save()
    assert not list(tmp_path.iterdir())


def test_it_is_what_it_watches() -> None:
    inner = Inner(Clock(), 2, 4)
    inner.mode, inner.staleness, inner.servers = "async", None, 3
    each = watched(inner, Straggler())
    assert (each.scheme, each.backend, each.rank, each.nranks) == ("local", "known", 2, 4)
    assert (each.mode, each.staleness, each.servers) == ("async", None, 3)


def test_a_watch_travels_as_json() -> None:
    watch = Watch(Straggler("random", 2.5, 7), 20, Path("a") / "b.npz")
    assert Watch.from_json(watch.to_json()) == watch
