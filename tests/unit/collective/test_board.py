"""The board between ranks of one host: nobody passes a meeting early, all read what was posted, the late are named."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from collective.transports.board import HALF_BYTES, NOTE_BYTES
from common.errors import PeerLost, PeerStalled
from tests.support.groups import (
    DEADLINE_S,
    assert_same_bits,
    board_of,
    errors_on,
    limit_waits,
    on_ranks,
    opened,
    sample,
)

LIMIT_S = 0.3


@pytest.fixture(params=[2, 3, 4], ids="N{}".format)
def boards(request):
    """The groups of all ranks; `board_of` each is what is tested here."""
    with opened("shm", request.param) as groups:
        yield groups


def test_nobody_leaves_a_meeting_before_everyone_has_come(boards):
    came = []

    def body(group):
        for i in range(50):
            came.append(i)
            board_of(group).meet()
            assert came.count(i) == len(boards)
            board_of(group).meet()

    on_ranks(boards, body)


def test_notes_halves_and_what_is_common_are_everyones_of_this_meeting(boards):
    """Though ranks that are quick have posted for the next one."""

    def note(rank, i):
        return bytes([rank, i]) * (NOTE_BYTES // 2)

    def body(group):
        board = board_of(group)
        everyones = range(len(boards))
        for i in range(20):
            board.halves[board.turn][group.rank][:] = sample(group.rank, HALF_BYTES, "uint8", seed=i)
            board.common[board.turn][group.rank :: len(boards)] = 10 * i + group.rank
            assert board.exchange(note(group.rank, i)) == b"".join(note(r, i) for r in everyones)
            assert all((board.common[1 - board.turn][r :: len(boards)] == 10 * i + r).all() for r in everyones)
            for r in everyones:
                if (i + r) % 5 == group.rank:  # not all, for speed
                    assert_same_bits(board.halves[1 - board.turn][r], sample(r, HALF_BYTES, "uint8", seed=i))

    on_ranks(boards, body)


def test_an_array_is_found_by_its_place_in_every_rank(boards):
    def body(group):
        board = board_of(group)
        assert board.locate(np.zeros(5)) is None
        arrays = [board.empty(1000 + i, np.float64) for i in range(5)]
        for i, array in enumerate(arrays):
            array[...] = 100 * group.rank + i
        places = [board.locate(array[i:]) for i, array in enumerate(arrays)]
        assert len(set(places)) == 5
        assert [offset for _, offset in places] == [0, 8, 16, 24, 32]
        board.meet()
        for r in range(len(boards)):
            for i, place in enumerate(places):
                assert set(board.array_of(r, *place, 1000, np.float64).tolist()) == {100 * r + i}
        board.meet()
        board.array_of((group.rank + 1) % len(boards), *places[0], 1, np.float64)[0] = group.rank
        board.meet()
        assert arrays[0][0] == (group.rank - 1) % len(boards)

    on_ranks(boards, body)


def test_whoever_does_not_come_is_named_by_all(boards):
    absent, others_gave_up = len(boards) - 1, threading.Barrier(len(boards))
    limit_waits(boards, LIMIT_S)

    def body(group):
        try:
            if group.rank != absent:
                board_of(group).meet()
        finally:
            others_gave_up.wait(DEADLINE_S)

    errors = errors_on(boards, body)
    assert errors[absent] is None
    for error in errors[:absent]:
        assert type(error) is PeerStalled
        assert str(error).startswith(f"rank {absent} did not take part for {LIMIT_S} s")


def test_whoever_is_frozen_while_it_comes_is_named_by_all(boards):
    """It was stopped inside `meet`, before it has told a single one."""
    frozen, others_gave_up = len(boards) - 1, threading.Barrier(len(boards))
    limit_waits(boards, LIMIT_S)

    def body(group):
        board = board_of(group)
        if group.rank == frozen:
            board._posts[board.turn].insert(0, lambda: others_gave_up.wait(DEADLINE_S))
            return board.meet()
        try:
            return board.meet()
        finally:
            others_gave_up.wait(DEADLINE_S)

    for error in errors_on(boards, body)[:frozen]:
        assert type(error) is PeerStalled
        assert str(error).startswith(f"rank {frozen} did not take part for {LIMIT_S} s")


def test_whoever_left_before_a_meeting_is_named_by_all(boards):
    def body(group):
        board_of(group).meet()
        if group.rank != 0:
            board_of(group).meet()

    errors = errors_on(boards, body)
    assert errors[0] is None
    for error in errors[1:]:
        assert type(error) is PeerLost
        assert "rank 0 finished while rank" in str(error) or "left with PeerLost" in str(error)


def test_whoever_leaves_after_a_meeting_holds_nobody_up(boards):
    """The others come to know that it has come, though they look when it has gone."""
    gone = threading.Event()

    def body(group):
        board = board_of(group)
        if group.rank == 0:
            for post in board._posts[board.turn]:  # as `meet` does, without waiting
                post()
            board._mine.meetings[0] = 1
            board.close()
            gone.set()
        else:
            gone.wait(DEADLINE_S)
            time.sleep(0.1)
            board.meet()

    assert on_ranks(boards, body) == [None] * len(boards)


def test_close_is_idempotent_and_silent(boards):
    for group in boards:
        for reason in ("", "ValueError: too late", ""):
            board_of(group).close(reason)
