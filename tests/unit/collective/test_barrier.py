"""The barrier between ranks of one host: nobody passes it early, all read what was posted, the late are named."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from collective.shared_memory import barrier
from collective.shared_memory.barrier import CROWDED_BYTES, HALF_BYTES, SHORT_BYTES
from collective.shared_memory.meetings.base import NOTE_BYTES
from common.errors import PeerLost, PeerStalled
from common.kernels.loader import KERNELS_VARIABLE
from tests.support.groups import (
    DEADLINE_S,
    assert_same_bits,
    barrier_of,
    errors_on,
    limit_waits,
    on_ranks,
    opened,
    sample,
)

LIMIT_S = 1.0  # as in test_busy.py


@pytest.fixture(params=[(2, "compiled"), (3, "semaphores"), (4, "compiled")], ids="N{0[0]}-{0[1]}".format)
def barriers(request, monkeypatch):
    """The groups of all ranks; `barrier_of` each is what is tested here."""
    nranks, way = request.param
    monkeypatch.setenv(KERNELS_VARIABLE, "auto" if way == "compiled" else "off")
    with opened("shm", nranks) as groups:
        assert all((barrier_of(group).compiled is not None) == (way == "compiled") for group in groups)
        yield groups


def come_without_waiting(meeting):
    """As `meet` does, but for what follows."""
    if meeting.compiled:
        meeting.compiled._meet()
    else:
        for post in meeting.meetings._posts[meeting.turn]:
            post()
        meeting.meetings._mine.meetings[0] = 1


def test_nobody_leaves_a_meeting_before_everyone_has_come(barriers):
    came = []

    def body(group):
        for i in range(50):
            came.append(i)
            barrier_of(group).meet()
            assert came.count(i) == len(barriers)
            barrier_of(group).meet()

    on_ranks(barriers, body)


def test_a_rank_that_failed_after_it_came_has_come(barriers, monkeypatch):
    """Else who waited for it would not learn what it had noted, as a call that is not everyone's."""
    meetings = barrier_of(barriers[0]).meetings

    def failed(*_):
        raise PeerLost("rank 1 left")

    monkeypatch.setattr(meetings._mesh, "check", failed)
    meetings._wait_longer(lambda: True, pytest.fail)
    with pytest.raises(PeerLost, match="rank 1 left"):
        meetings._wait_longer(lambda: False, pytest.fail)


def test_a_meeting_that_all_have_come_to_is_looked_at_again(barriers, monkeypatch):
    """Nobody is late, yet the call isn't done: it meets more than once, and the next meeting is about to begin."""
    meetings = barrier_of(barriers[0]).meetings
    monkeypatch.setattr(meetings, "_late", list)
    looks = iter([False, False, False, True])
    meetings._wait_longer(lambda: next(looks), lambda _: None)
    assert not list(looks)


def test_posts_of_earlier_meetings_do_not_keep_a_waiting_rank_awake(barriers, monkeypatch):
    """Who came just before a rank slept has posted to it nevertheless; thousands of calls leave thousands of posts."""
    compiled = barrier_of(barriers[0]).compiled
    if compiled is None:
        pytest.skip("semaphores' posts are all taken")
    for _ in range(1000):
        compiled._semaphore.post()
    looked = []
    monkeypatch.setattr(compiled, "_wait", lambda wait=compiled._wait: (looked.append(1), wait()))
    came = threading.Event()

    def body(group):
        if group.rank:
            came.wait(DEADLINE_S)
        barrier_of(group).meet()

    threading.Timer(0.2, came.set).start()
    on_ranks(barriers, body)
    assert len(looked) < 50


def test_notes_halves_and_the_area_for_short_arrays_are_everyones_of_this_meeting(barriers):
    """Though ranks that are quick have posted for the next one."""

    def note(rank, i):
        return bytes([rank, i]) * (NOTE_BYTES // 2)

    def body(group):
        meeting = barrier_of(group)
        everyones = range(len(barriers))
        for i in range(20):
            meeting.halves[meeting.turn][group.rank][:] = sample(group.rank, HALF_BYTES, "uint8", seed=i)
            meeting.short[meeting.turn][group.rank :: len(barriers)] = 10 * i + group.rank
            assert meeting.exchange(note(group.rank, i)) == [note(r, i) for r in everyones]
            assert meeting.exchange(bytes(NOTE_BYTES)) is None
            meeting.meet()
            assert all((meeting.short[1 - meeting.turn][r :: len(barriers)] == 10 * i + r).all() for r in everyones)
            for r in everyones:
                if (i + r) % 5 == group.rank:  # not all, for speed
                    assert_same_bits(meeting.halves[1 - meeting.turn][r], sample(r, HALF_BYTES, "uint8", seed=i))

    on_ranks(barriers, body)


@pytest.mark.parametrize("seen", [(8, 8), (1, 1), (1, 8)], ids=["by none", "by both", "by one"])
def test_more_is_short_where_a_rank_sees_fewer_cores_than_ranks(seen, monkeypatch):
    cores = iter(seen)
    monkeypatch.setattr(barrier, "cores", lambda: next(cores))
    with opened("shm", 2) as groups:
        short = {barrier_of(group).short_bytes for group in groups}
        assert short == {SHORT_BYTES if seen == (8, 8) else CROWDED_BYTES // 2}

        def body(group):
            for nbytes in (CROWDED_BYTES // 2, CROWDED_BYTES // 2 + 4, 8):
                array = np.full(nbytes // 4, group.rank + 1, np.float32)
                group.all_reduce(array, "sum")
                assert (array == 3).all()

        on_ranks(groups, body)


def test_an_array_is_found_by_its_place_in_every_rank(barriers):
    def body(group):
        meeting = barrier_of(group)
        assert meeting.locate(np.zeros(5)) is None
        arrays = [meeting.empty(1000 + i, np.float64) for i in range(5)]
        for i, array in enumerate(arrays):
            array[...] = 100 * group.rank + i
        places = [meeting.locate(array[i:]) for i, array in enumerate(arrays)]
        assert len(set(places)) == 5
        assert [offset for _, offset in places] == [0, 8, 16, 24, 32]
        meeting.meet()
        for r in range(len(barriers)):
            for i, place in enumerate(places):
                assert set(meeting.array_of(r, *place, 1000, np.float64).tolist()) == {100 * r + i}
        meeting.meet()
        meeting.array_of((group.rank + 1) % len(barriers), *places[0], 1, np.float64)[0] = group.rank
        meeting.meet()
        assert arrays[0][0] == (group.rank - 1) % len(barriers)

    on_ranks(barriers, body)


def test_whoever_does_not_come_is_named_by_all(barriers):
    absent, others_gave_up = len(barriers) - 1, threading.Barrier(len(barriers))
    limit_waits(barriers, LIMIT_S)

    def body(group):
        try:
            if group.rank != absent:
                barrier_of(group).meet()
        finally:
            others_gave_up.wait(DEADLINE_S)

    errors = errors_on(barriers, body)
    assert errors[absent] is None
    for error in errors[:absent]:
        assert type(error) is PeerStalled
        assert str(error).startswith(f"rank {absent} did not take part for {LIMIT_S:g} s")


def test_whoever_is_frozen_while_it_comes_is_named_by_all(barriers):
    """It was stopped inside `meet`, before it has told a single one."""
    frozen, others_gave_up = len(barriers) - 1, threading.Barrier(len(barriers))
    limit_waits(barriers, LIMIT_S)

    def body(group):
        meeting = barrier_of(group)
        if group.rank == frozen:
            if meeting.compiled:  # which comes all at once
                others_gave_up.wait(DEADLINE_S)
            else:
                meeting.meetings._posts[meeting.turn].insert(0, lambda: others_gave_up.wait(DEADLINE_S))
            return meeting.meet()
        try:
            return meeting.meet()
        finally:
            others_gave_up.wait(DEADLINE_S)

    for error in errors_on(barriers, body)[:frozen]:
        assert type(error) is PeerStalled
        assert str(error).startswith(f"rank {frozen} did not take part for {LIMIT_S:g} s")


def test_whoever_left_before_a_meeting_is_named_by_all(barriers):
    def body(group):
        barrier_of(group).meet()
        if group.rank != 0:
            barrier_of(group).meet()

    errors = errors_on(barriers, body)
    assert errors[0] is None
    for error in errors[1:]:
        assert type(error) is PeerLost
        assert "rank 0 finished while rank" in str(error) or "left with PeerLost" in str(error)


def test_whoever_leaves_after_a_meeting_holds_nobody_up(barriers):
    """The others come to know that it has come, though they look when it has gone."""
    gone = threading.Event()

    def body(group):
        meeting = barrier_of(group)
        if group.rank == 0:
            come_without_waiting(meeting)
            meeting.close()
            gone.set()
        else:
            gone.wait(DEADLINE_S)
            time.sleep(0.1)
            meeting.meet()

    assert on_ranks(barriers, body) == [None] * len(barriers)


def test_close_is_idempotent_and_silent(barriers):
    for group in barriers:
        for reason in ("", "ValueError: too late", ""):
            barrier_of(group).close(reason)


def test_where_one_rank_has_no_compiled_code_all_meet_by_semaphores(monkeypatch):
    can = iter([True, False, True])
    monkeypatch.setattr(barrier, "can_be_compiled", lambda: next(can))
    with opened("shm", 3) as groups:
        assert [barrier_of(group).compiled for group in groups] == [None] * 3
        on_ranks(groups, lambda group: group.barrier())
