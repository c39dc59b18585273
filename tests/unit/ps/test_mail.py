"""What a trainer keeps of others' messages, and when it makes room for more."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from common.errors import ProtocolError, StaleEpoch
from common.network.gradsync_pb2 import Parcel, ServerMessage, Taken, TrainerMessage
from common.network.rpc import CHUNK_BYTES
from ps.client import mail as mail_module
from ps.client.mail import Mail
from ps.planes.parcels import PARCEL_BYTES, ROOM_BYTES, cost_of, parcels_of

NRANKS = 4
FEW = ROOM_BYTES // (2 * NRANKS)


class Noting(Mail):
    """Notes whom it tells of how much room."""

    def __init__(self) -> None:
        super().__init__(NRANKS, 0, threading.Condition())
        self.said: list[TrainerMessage] = []
        self.say = self.said.append

    def hear(self, source: int, data: bytes, *, channel: int = 0) -> None:
        for piece in parcels_of(memoryview(data), epoch=0, rank=source, channel=channel):
            self.next(piece)

    def next(self, piece: Parcel) -> None:
        piece.number = self.parcels[piece.rank]
        self.take(ServerMessage(parcel=piece), "server 0")

    def told(self) -> list[tuple[int, int]]:
        return [(each.taken.rank, each.taken.bytes) for each in self.said]


def sizes(pieces: Iterable[Parcel]) -> list[tuple[int, int]]:
    return [(len(each.data), each.size) for each in pieces]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, [0]), (1, [1]), (CHUNK_BYTES, [CHUNK_BYTES]), (2 * CHUNK_BYTES + 5, [CHUNK_BYTES, CHUNK_BYTES, 5])],
)
def test_a_message_is_cut_into_pieces_of_which_there_is_at_least_one(size: int, expected: list[int]) -> None:
    pieces = parcels_of(memoryview(bytes(size)), epoch=0, rank=1, channel=2)
    assert sizes(pieces) == [(each, size) for each in expected]


def test_pieces_that_mingle_are_joined_by_sender_and_channel() -> None:
    mail = Noting()
    messages = [bytes([n]) * (CHUNK_BYTES + 1 + n) for n in range(4)]
    streams = [list(parcels_of(memoryview(m), epoch=0, rank=n % 2, channel=n)) for n, m in enumerate(messages)]
    for pieces in zip(*streams, strict=True):
        assert not any(mail.has(n % 2, n) for n in range(4))
        for piece in pieces:
            mail.next(piece)
    for n in range(4):
        assert mail.pop(n % 2, n) == messages[n]
        assert not mail.has(n % 2, n)
        assert not mail.has(1 - n % 2, n)


def test_more_than_a_message_has_is_refused() -> None:
    mail = Noting()
    with pytest.raises(ProtocolError, match="server 0 sent 3 bytes of a message of 2 of rank 1"):
        mail.take(ServerMessage(parcel=Parcel(rank=1, size=2, data=b"abc")), "server 0")


@pytest.mark.parametrize("number", [0, 2])
def test_a_parcel_that_came_before_or_comes_too_early_is_refused(number: int) -> None:
    mail = Noting()
    mail.hear(1, b"one")
    with pytest.raises(ProtocolError, match=rf"^server 0 passed on parcel {number} of rank 1, expected 1$"):
        mail.take(ServerMessage(parcel=Parcel(rank=1, number=number)), "server 0")


def test_a_parcel_of_another_epoch_is_refused() -> None:
    with pytest.raises(StaleEpoch, match=r"^server 0 passed on a parcel of epoch 3, this is epoch 0$"):
        Noting().take(ServerMessage(parcel=Parcel(rank=1, epoch=3)), "server 0")


def test_a_sender_hears_now_and_then_of_what_was_taken() -> None:
    """Always soon enough that half of its room is left, with all other ranks as receivers."""
    mail, count = Noting(), 2 * FEW // (1000 + PARCEL_BYTES)
    for _ in range(count):
        mail.hear(1, bytes(1000))
    told = mail.told()
    assert [rank for rank, _ in told] == [1]
    assert FEW < told[0][1] <= FEW + 1000 + PARCEL_BYTES
    assert (NRANKS - 1) * FEW <= ROOM_BYTES / 2


def test_who_holds_much_makes_room_only_for_the_rank_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_module, "HELD_BYTES", 3 * CHUNK_BYTES)
    mail, cost = Noting(), cost_of(Parcel(data=bytes(CHUNK_BYTES)))
    whole = bytes(2 * CHUNK_BYTES)
    mail.hear(1, whole)
    mail.hear(1, whole)
    assert mail.told() == [(1, cost)] * 3
    mail.hear(2, whole)
    mail.ask(3)
    assert len(mail.said) == 3
    mail.ask(2)
    assert mail.told()[3:] == [(2, 2 * cost)]
    mail.ask(-1)
    mail.hear(3, whole)
    for source in (1, 1):
        mail.pop(source, 0)
        assert len(mail.said) == 4
    mail.pop(2, 0)
    assert mail.told()[4:] == [(1, cost), (3, 2 * cost)]


def test_room_is_what_others_have_not_taken() -> None:
    mail = Noting()
    piece = Parcel(rank=1, data=bytes(ROOM_BYTES // 2))
    assert mail.has_room(cost_of(piece))
    mail.send(piece)
    assert not mail.has_room(cost_of(piece))
    assert mail.on_the_way == {1: cost_of(piece)}
    mail.take(ServerMessage(taken=Taken(rank=1, bytes=2 * PARCEL_BYTES)), "server 0")
    assert mail.has_room(cost_of(piece))
