"""Ranks that live, but do not come: waited for, and named by one line, whatever carries the data."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest

from collective.call_tags import Tag
from collective.membership.liveness import Mesh
from common.errors import PeerStalled
from tests.support.commands import until
from tests.support.groups import DEADLINE_S, barrier_of, errors_on, limit_waits, on_ranks, opened, transport_of

LIMIT_S = 1.0  # less, and on a loaded machine threads are silent for longer


ONLY_RANK_2 = re.compile(r"rank [013, ]+ waits? for rank 2, for \d+ s; it is alive")


@pytest.fixture
def said(monkeypatch):
    """What the lowest rank that waits says; and whether that was that all wait for rank 2 only. On a loaded machine it
    may see later than it speaks that others have begun to wait, too."""
    lines, only_rank_2 = [], threading.Event()

    def keep(_, line):
        if line:
            lines.append(line)
        if ONLY_RANK_2.fullmatch(line):
            only_rank_2.set()

    monkeypatch.setattr(Mesh, "_say", keep)
    return lines, only_rank_2


@pytest.mark.parametrize(
    "backend", ["shm", "tcp", *(pytest.param(b, marks=pytest.mark.long) for b in ("tcp-ring", "tcp-hierarchical"))]
)
def test_a_late_rank_is_waited_for(backend, said):
    """In a hierarchical group ranks wait in shared memory for one that waits for another host."""
    lines, only_rank_2 = said
    with opened(backend, 4) as groups:
        limit_waits(groups, LIMIT_S, wait_limit=DEADLINE_S)

        def body(group):
            if group.rank == 2:
                assert only_rank_2.wait(DEADLINE_S / 2), lines
            array = np.full(1000, group.rank, np.float32)
            group.all_reduce(array, "sum")
            return array[-1]

        assert on_ranks(groups, body) == [6] * 4


@pytest.mark.parametrize("way", ["shm", "tcp", "tcp-ring", "a message"])
def test_a_rank_whose_wait_is_over_does_not_wait(way):
    """Else others would take it for one that waits for half a second more, and blame who does."""
    with opened("tcp" if way == "a message" else way, 2) as groups:
        waiting = groups[0].messenger._mesh

        def body(group):
            if group.rank:
                until(waiting._waited, "the wait")
            if way != "a message":
                group.all_reduce(np.full(1000, group.rank, np.float32))
            elif group.rank:
                group.messenger.send(0, 1, b"late")
            else:
                group.messenger.receive(1, 1)
            return waiting._waited() if group is groups[0] else 0

        waiting.stop_waiting()  # for joining
        assert on_ranks(groups, body) == [0, 0]


def test_ranks_that_wait_for_one_another_are_told_so(said):
    """At the timeout, although all live."""
    with opened("tcp-ring", 2) as groups:
        limit_waits(groups, LIMIT_S, wait_limit=DEADLINE_S)
        out = [np.empty(1, np.float32) for _ in groups]

        def body(group):
            transport_of(group).receive(1 - group.rank, out[group.rank], Tag(0, 0, 0, 0, 0, 0))

        errors = errors_on(groups, body)
    assert {type(error) for error in errors} == {PeerStalled}
    pattern = r"rank ([01]) did not take part for 1 s \(rank ([01]) was waiting for data\); every rank waits for "
    assert re.match(pattern + "another one: their calls differ, or the network between them is cut", str(errors[0]))
    assert said[0] == []


def test_a_rank_that_was_stopped_itself_blames_nobody_before_it_has_asked(said):
    """As where a whole container is paused: when it goes on, all have been silent for long."""
    with opened("shm", 2) as groups:
        limit_waits(groups, LIMIT_S, wait_limit=3600.0)
        mesh, paused = barrier_of(groups[0])._mesh, time.monotonic() - 100
        mesh.wait_on(1, "waiting for it", paused)
        while mesh.peers[1].heard_at == 0 or not said[0]:  # it may just have waited itself, to join
            mesh.wait_on(1, "waiting for it", paused)
        assert re.fullmatch(r"rank 0 waits for rank 1, for 10\d s; it is alive", "".join(said[0]))
