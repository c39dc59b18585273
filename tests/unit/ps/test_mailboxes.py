"""The mailboxes between a server and its trainers: every one a bounded queue, whoever is fast."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.system.memory import Segment
from ps.planes.mailboxes import NOTE_BYTES, SLOTS, Mailbox, Mailboxes, mailboxes_bytes
from tests.support.thorough import examples

DEADLINE_S = 20.0
NRANKS = 3

puts = st.tuples(st.integers(0, NRANKS - 1), st.booleans(), st.binary(max_size=40))
takes = st.tuples(st.integers(0, NRANKS - 1), st.booleans(), st.just(None))


def both_ends() -> tuple[Mailboxes, Mailboxes]:
    """A server's view and a trainer's, which maps the same memory at another address."""
    segment = Segment(mailboxes_bytes(NRANKS))
    server = Mailboxes(segment, NRANKS, create=True)
    return server, Mailboxes(Segment(segment.nbytes, descriptor=segment.descriptor), NRANKS)


@settings(max_examples=examples(30, 300), deadline=None)
@given(st.lists(st.one_of(puts, puts, takes), max_size=4 * SLOTS))
def test_every_mailbox_is_a_bounded_queue_of_its_own(
    actions: list[tuple[int, bool, bytes | None]],
) -> None:
    server, trainer = both_ends()
    ends = {
        True: (trainer.to_server, server.to_server),
        False: (server.to_trainer, trainer.to_trainer),
    }
    model = {(rank, way): deque[bytes]() for rank in range(NRANKS) for way in ends}
    rung = 0
    for rank, way, note in actions:
        writers, readers = ends[way]
        queue = model[rank, way]
        if note is None:
            assert readers[rank].take() == (queue.popleft() if queue else None)
            continue
        has_room = len(queue) < SLOTS
        assert writers[rank].put(note) is has_room
        if has_room:
            queue.append(note)
            rung += way
    for (rank, way), queue in model.items():
        assert [ends[way][1][rank].take() for _ in queue] == list(queue)
        assert ends[way][1][rank].take() is None
    assert [server.bell.sleep(0) for _ in range(rung)] == [True] * rung
    assert server.bell.missed()


def test_a_full_mailbox_refuses_and_has_room_again() -> None:
    server, trainer = both_ends()
    writer, reader = trainer.to_server[1], server.to_server[1]
    for turn in range(3):
        assert [writer.put(bytes([turn, i])) for i in range(SLOTS + 1)] == [True] * SLOTS + [False]
        assert [reader.take() for i in range(SLOTS + 1)] == [*(bytes([turn, i]) for i in range(SLOTS)), None]


@pytest.mark.parametrize("size", [0, 1, NOTE_BYTES, NOTE_BYTES + 1])
def test_notes_have_a_limit(size: int) -> None:
    server, trainer = both_ends()
    fits = size <= NOTE_BYTES
    assert trainer.to_server[0].put(bytes(size)) is fits
    assert server.to_server[0].take() == (bytes(size) if fits else None)


def test_a_reader_that_waits_gets_all_in_order_from_a_writer_that_never_waits() -> None:
    server, trainer = both_ends()
    count = 5000

    def write(mailbox: Mailbox) -> None:
        sent = 0
        while sent < count:
            sent += mailbox.put(sent.to_bytes(4, "little"))

    writer = threading.Thread(target=write, args=(trainer.to_server[2],), daemon=True)
    writer.start()
    got = [server.to_server[2].wait(DEADLINE_S) for _ in range(count)]
    writer.join(DEADLINE_S)
    assert got == [i.to_bytes(4, "little") for i in range(count)]
    assert server.to_server[2].wait(0.0) is None
