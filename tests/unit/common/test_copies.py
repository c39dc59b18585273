"""Copies of what ranks have alone, on another host: who comes in the place of one that is lost gets them back."""

from __future__ import annotations

import os
import queue
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from collective.algorithms.ring import RingAlgorithm
from collective.group import Group
from collective.synchronizer import RingSynchronizer
from collective.transports.threads import connect_threads
from common.commit.kept_parts import COPIES_VARIABLE, HOLDS, KEPT_VARIABLE, KeptParts, make_kept, path_of
from common.commit.parts import Part
from common.errors import RecoveryFailed
from common.sync import copies
from common.sync.boundaries import Boundaries, Boundary
from common.sync.messenger import Messenger
from common.system.process import JOINED_VARIABLE, RESTARTS_VARIABLE

N, EACH, WAIT_S = 6, 2, 20.0

Post = dict[tuple[int, int, int], "queue.SimpleQueue[bytes]"]


class Mail(Messenger):
    """Between threads."""

    def __init__(self, rank: int, post: Post) -> None:
        self.rank, self.nranks, self._post = rank, N, post

    def send(self, to: int, channel: int, data: bytes | bytearray | memoryview) -> None:
        self._post[self.rank, to, channel].put(bytes(data))

    def receive(self, source: int, channel: int) -> bytearray:
        return bytearray(self._post[source, self.rank, channel].get(timeout=WAIT_S))

    def comes(self, source: int, channel: int, seconds: float) -> bool:
        raise NotImplementedError


class Job:
    """Of three hosts with two ranks each; every rank in a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.memory = [make_kept() for _ in range(N)]
        self.ranks: list[Any] = [None] * N
        self.meet(range(N))

    def meet(self, new: Any) -> None:
        """All are in a new group, these ranks as new processes."""
        post: Post = defaultdict(queue.SimpleQueue)
        for rank, transport in enumerate(connect_threads(N)):
            group = Group(RingAlgorithm(transport), backend="threads", messenger=Mail(rank, post))
            if rank in new:
                self._monkeypatch.setenv(KEPT_VARIABLE, path_of(self.memory[rank]))
                self.ranks[rank] = Boundaries(RingSynchronizer(group, connect=lambda _, group=group: group), 5.0)
            else:
                self.ranks[rank]._synchronizer.__init__(group, connect=lambda _, group=group: group)

    def lose(self, host: int) -> None:
        """Its ranks, and what its launcher held; others come."""
        lost = range(host * EACH, host * EACH + EACH)
        for rank in lost:
            os.close(self.memory[rank])
            self.memory[rank] = make_kept()
        self.meet(lost)

    def each(self, what: Callable[[int, Boundaries], Any]) -> list[Any]:
        """What comes of it on every rank."""
        out: list[Any] = [None] * N

        def run(rank: int) -> None:
            try:
                out[rank] = what(rank, self.ranks[rank])
            except Exception as exc:
                out[rank] = exc

        threads = [Thread(target=run, args=(rank,)) for rank in range(N)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        return out

    def keep(self, *steps: int) -> None:
        for step in steps:
            assert self.each(lambda rank, mine, step=step: mine.keep(step, own(rank, step), same(step))) == [None] * N

    def agree(self) -> list[Any]:
        return self.each(lambda _, mine: mine.agree())


def own(rank: int, step: int) -> Part:
    return Part({"values": np.array([rank, step])}, {"rank": rank})


def same(step: int) -> Part:
    return Part({"values": np.array([step, 7])})


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Job]:
    monkeypatch.setenv(COPIES_VARIABLE, str(EACH))
    monkeypatch.setenv(RESTARTS_VARIABLE, "1")
    monkeypatch.setenv(JOINED_VARIABLE, str(tmp_path / "notes"))
    made = Job(monkeypatch)
    yield made
    for descriptor in made.memory:
        os.close(descriptor)


def assert_all_are_at(step: int, found: list[Any]) -> None:
    for rank, boundary in enumerate(found):
        assert isinstance(boundary, Boundary), boundary
        assert (boundary.step, boundary.own.state) == (step, {"rank": rank})
        assert boundary.own.arrays["values"].tolist() == [rank, step]
        assert boundary.common.arrays["values"].tolist() == [step, 7]


@pytest.mark.parametrize("host", [0, 1, 2])
def test_who_comes_in_the_place_of_a_lost_host_goes_on_where_the_others_are(host: int, job: Job) -> None:
    job.keep(3, 4, 5)
    job.lose(host)
    assert_all_are_at(5, job.agree())
    assert KeptParts(path_of(job.memory[2 * host])).steps() == [5]
    job.lose((host + 1) % 3)  # with which the copies of the first one's were, which has exchanged them anew
    assert_all_are_at(5, job.agree())


def test_a_copy_that_did_not_come_any_more_costs_a_step(job: Job) -> None:
    job.keep(3, 4)
    for rank in (0, 1, 4, 5):  # those of host 1 die before they send theirs
        job.ranks[rank]._copies, kept = None, job.ranks[rank]._copies
        job.ranks[rank].keep(5, own(rank, 5), same(5))
        job.ranks[rank]._copies = kept
    job.lose(1)
    assert_all_are_at(4, job.agree())


def test_what_is_too_large_is_not_sent_and_then_nobody_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(copies, "MOST_BYTES", 10)
    job.keep(3, 4)
    assert not (tmp_path / "notes").exists()
    job.lose(2)
    for error in job.agree():
        assert isinstance(error, RecoveryFailed)
        assert "no step boundary that all ranks have (rank 0: [3, 4]; " in str(error)
        assert "rank 4: []; rank 5: [])" in str(error)


def test_each_tells_its_launcher_once_of_whom_it_has_a_copy(job: Job, tmp_path: Path) -> None:
    job.keep(3, 4, 5)
    assert sorted((tmp_path / "notes").read_text().splitlines()) == [f"{HOLDS} {rank}" for rank in range(N)]


def test_who_keeps_nothing_of_a_step_does_not_hold_the_others_up(job: Job) -> None:
    job.keep(3)
    assert (
        job.each(lambda rank, mine: mine.keep_none() if rank == 2 else mine.keep(4, own(rank, 4), same(4)))
        == [None] * N
    )
    job.lose(1)
    assert_all_are_at(3, job.agree())


def test_where_all_are_new_there_is_nothing_to_agree_on(job: Job) -> None:
    assert job.agree() == [None] * N
