"""A measurement checks sums and parameters and times each call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.contestants.table_of_sweeps import RATE
from benchmarks.operations.group import mean_seconds, seconds_of_each
from benchmarks.operations.worker import BLOCK, measure, wrong_parameters


class FakePeer:
    """Sums as if two more ranks had the same array; `error` is added to one element."""

    def __init__(self, error: float = 0.0) -> None:
        self.array: Any = None
        self.apart = False
        self.calls, self.error = 0, error

    def resize(self, count: int) -> None:
        self.array = np.empty(count, np.float32)

    def all_reduce(self) -> None:
        self.calls += 1
        pattern = self.array - 1 if self.array.any() else self.array
        self.array[...] = pattern * 3 + (3 if self.array.any() else 0)
        self.array[-1] += self.error


def test_a_measurement_checks_sums_and_times_each_call() -> None:
    good = FakePeer()
    found = measure(good, "all_reduce", {"count": 100, "iterations": 4, "warmup": 2}, 1, 3, checked=True)
    assert found["wrong"] == 0
    assert len(found["times"]) == 1 + 4
    assert good.calls == 1 + 2 + 4
    assert (
        measure(FakePeer(1.0), "all_reduce", {"count": 100, "iterations": 1, "warmup": 2}, 1, 3, checked=True)["wrong"]
        == 1
    )
    assert (
        measure(FakePeer(1.0), "all_reduce", {"count": 100, "iterations": 1, "warmup": 2}, 1, 3, checked=False)["wrong"]
        == 0
    )


def test_ranks_that_run_apart_begin_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 9.0, 10.0, 12.0] * 2)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    job, rank = {"count": 1, "iterations": 4, "warmup": 0}, FakePeer()
    assert measure(rank, "all_reduce", job, 0, 1, checked=False) == {"times": [0, 1, 9, 10, 12], "wrong": 0}
    begun: list[bool] = []
    found = measure(rank, "all_reduce", job, 0, 1, checked=False, begin=lambda: begun.append(True))
    assert found["times"] == [0, 1, 9, 10, 12]
    assert begun == [True]


def test_ranks_that_take_turns_are_not_counted_twice() -> None:
    times = [[0.0, 4.0, 5.0, 9.0], [1.0, 2.0, 6.0, 7.0]]
    assert seconds_of_each(times) == [3, 2, 3]
    assert mean_seconds(times) == [3, 3, 3]


class FakeServer(FakePeer):
    """SGD at 0.5 as if two more trainers had pushed; the first trainer's gradients are one less than the second's."""

    def resize(self, count: int) -> None:
        super().resize(count)
        self.parameters = np.full(count, 3.0, np.float32)

    def push_pull(self) -> None:
        self.calls += 1
        self.parameters -= np.float32(0.5) * self.array
        self.parameters[-1] += self.error


@pytest.mark.parametrize(("error", "wrong"), [(0.0, 0), (1.0, 1)])
def test_a_round_is_checked_by_its_parameters(error: float, wrong: int) -> None:
    peer = FakeServer(error)
    found = measure(peer, "push_pull", {"count": 100, "iterations": 4, "warmup": 2}, 1, 3, checked=True)
    assert found["wrong"] == wrong
    assert peer.calls == 1 + 2 + 4


class FakeBroadcast(FakePeer):
    """Rank 1, to which rank 0's values come."""

    def broadcast(self) -> None:
        self.array -= self.array.any() + self.error


@pytest.mark.parametrize(("error", "wrong"), [(0.0, 0), (1.0, 100)])
def test_a_broadcast_is_checked_by_values_that_only_rank_0_had(error: float, wrong: int) -> None:
    job = {"count": 100, "iterations": 1, "warmup": 0, "check": True}
    assert measure(FakeBroadcast(error), "broadcast", job, 1, 3, checked=True)["wrong"] == wrong


@pytest.mark.parametrize("size", [0, 1, 100, 3 * BLOCK + 5])
@pytest.mark.parametrize("broken", [0, 2])
def test_the_check_of_a_round_counts_what_is_wrong(size: int, broken: int) -> None:
    peer = SimpleNamespace(array=np.zeros(size, np.float32), parameters=np.ones(size, np.float32))

    def push_pull() -> None:  # of four ranks, this one has rank 2
        peer.parameters -= np.float32(RATE) * (peer.array - np.float32(0.5))
        peer.parameters[size - broken :] += 1

    peer.push_pull = push_pull
    assert wrong_parameters(peer, 2, 4) == min(broken, size)
