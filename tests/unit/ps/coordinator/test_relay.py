"""Messages between trainers, as a server passes them on: what it never keeps, refuses, and who is missed."""

from __future__ import annotations

import pytest

from common.errors import PeerLost, PeerStalled, ProtocolError, StaleEpoch
from common.network.gradsync_pb2 import Awaiting, Hello, Parcel, Taken, TrainerMessage
from common.network.rpc import CHUNK_BYTES
from ps.coordinator.coordinator import Coordinator
from ps.planes.parcels import ROOM_BYTES, cost_of
from tests.support.trainer_messages import (
    Clock,
    Inbox,
    Setting,
    commit_message,
    goodbye_message,
    open_group,
    outcome_of,
    running,
    stalled,
)

COST = cost_of(Parcel(data=bytes(CHUNK_BYTES)))


def entered(nranks: int, **options: object) -> Setting:
    """All have come, and nobody has registered."""
    setting = open_group(nranks, **options)
    for rank in range(nranks):
        come(setting, rank)
    return setting


def come(setting: Setting, rank: int) -> None:
    setting.group.enter(TrainerMessage(hello=Hello(rank=rank)), setting.inboxes[rank])


def parcel(
    to: int, data: bytes, number: int = 0, *, channel: int = 0, size: int | None = None, epoch: int = 0
) -> TrainerMessage:
    size = len(data) if size is None else size
    label = {"epoch": epoch, "rank": to, "channel": channel, "number": number}
    return TrainerMessage(parcel=Parcel(**label, size=size, data=data))


def taken(of: int, nbytes: int) -> TrainerMessage:
    return TrainerMessage(taken=Taken(rank=of, bytes=nbytes))


def awaits(whom: int, parcels: int = 0, *, room: bool = False, over: bool = False) -> TrainerMessage:
    return TrainerMessage(awaiting=Awaiting(rank=whom, parcels=parcels, room=room, over=over))


def received(inbox: Inbox) -> list[tuple[int, int, int, bytes]]:
    parcels = [message.parcel for message in inbox.of_kind("parcel")]
    return [(each.rank, each.channel, each.size, each.data) for each in parcels]


def room(inbox: Inbox) -> list[tuple[int, int]]:
    return [(message.taken.rank, message.taken.bytes) for message in inbox.of_kind("taken")]


def test_parcels_go_to_whom_they_are_for_and_say_whose_they_are() -> None:
    setting = entered(3)
    setting.say(0, parcel(2, b"ab", channel=7, size=3))
    setting.say(1, parcel(2, b"", channel=2**32 - 1))
    setting.say(0, parcel(2, b"c", 1, channel=7, size=3))
    setting.say(2, parcel(0, b"back"))
    assert received(setting.inboxes[2]) == [(0, 7, 3, b"ab"), (1, 2**32 - 1, 0, b""), (0, 7, 3, b"c")]
    assert received(setting.inboxes[0]) == [(2, 0, 4, b"back")]
    assert received(setting.inboxes[1]) == []


def test_who_has_not_come_yet_gets_them_then() -> None:
    setting = open_group(2)
    come(setting, 1)
    setting.say(1, parcel(0, b"early"))
    setting.say(1, parcel(0, b"bird", 1))
    come(setting, 0)
    assert received(setting.inboxes[0]) == [(1, 0, 5, b"early"), (1, 0, 4, b"bird")]


def test_parcels_are_no_step_and_wait_for_none() -> None:
    setting = running(2)
    setting.step(0, 0)
    setting.say(0, parcel(1, b"in between"))
    setting.push_all(1, 0)
    setting.say(1, parcel(0, b"too"))
    setting.say(1, commit_message(0))
    assert setting.group.steps == 1
    assert [len(received(inbox)) for inbox in setting.inboxes] == [1, 1]


def test_a_sender_has_room_again_for_what_was_taken() -> None:
    setting = entered(3)
    for to, number in ((1, 0), (2, 0), (1, 1)):
        setting.say(0, parcel(to, bytes(100), number))
    setting.say(1, taken(0, 150))
    setting.say(2, taken(0, 356))
    setting.say(1, taken(0, 356 * 2 - 150))
    assert room(setting.inboxes[0]) == [(1, 150), (2, 356), (1, 562)]


def test_more_than_the_room_is_refused_whoever_it_is_for() -> None:
    setting = entered(3)
    count = ROOM_BYTES // COST
    for number in range(count):
        setting.say(0, parcel(1 + number % 2, bytes(CHUNK_BYTES), number // 2))
    setting.say(1, taken(0, COST))
    setting.say(0, parcel(1 + count % 2, bytes(CHUNK_BYTES), count // 2))
    assert setting.group.failure is None
    setting.say(0, parcel(1 + (count + 1) % 2, bytes(CHUNK_BYTES), (count + 1) // 2))
    setting.failed(ProtocolError, rf"rank 0 sent more parcels than there is room for \({ROOM_BYTES:,} bytes\)")


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        (parcel(1, b"mine"), ProtocolError, "rank 1 sent a parcel of 4 bytes to rank 1"),
        (parcel(2, b"whose"), ProtocolError, "rank 1 sent a parcel of 5 bytes to rank 2"),
        (parcel(0, bytes(CHUNK_BYTES + 1)), ProtocolError, "rank 1 sent a parcel of 1,048,577 bytes to rank 0"),
        (parcel(0, b"late", epoch=3), StaleEpoch, "rank 1 sent a message of epoch 3"),
        (parcel(0, b"again", 1), ProtocolError, "rank 1 sent parcel 1 to rank 0, expected 0"),
        (taken(0, 1), ProtocolError, "rank 1 took 1 bytes of rank 0 that were not sent"),
        (taken(9, 1), ProtocolError, "rank 1 took 1 bytes of rank 9 that were not sent"),
        (awaits(2), ProtocolError, "rank 1 waits for rank 2"),
    ],
)
def test_what_cannot_be_meant_fails_the_group(message: TrainerMessage, kind: type, text: str) -> None:
    setting = entered(2)
    setting.say(1, message)
    setting.failed(kind, text)


@pytest.mark.parametrize("which", ["server 1", "model 1"])
def test_only_server_0_passes_on_and_for_its_first_model(which: str) -> None:
    setting = entered(2, **({"shard": (1, 2)} if which == "server 1" else {"first": Coordinator(2)}))
    setting.say(1, parcel(0, b"x"))
    setting.failed(ProtocolError, "rank 1 sent an unexpected parcel message")


def test_what_is_for_those_who_have_finished_is_lost_and_takes_no_room() -> None:
    setting = entered(2)
    setting.say(0, parcel(1, b"before"))
    setting.say(1, goodbye_message())
    setting.say(0, parcel(1, b"after"))
    assert room(setting.inboxes[0]) == [(1, 6 + 256), (1, 5 + 256)]
    assert setting.group.failure is None
    setting.say(0, goodbye_message())
    assert outcome_of(setting.group) is None


@pytest.mark.parametrize("first", ["goodbye", "wait"])
def test_who_waits_for_a_message_of_one_that_has_finished_is_told(first: str) -> None:
    setting = entered(3)
    setting.say(2, parcel(0, b"one"))
    order = [(2, goodbye_message()), (0, awaits(2, parcels=1))]
    for rank, message in order if first == "goodbye" else order[::-1]:
        assert setting.group.failure is None
        setting.say(rank, message)
    setting.inboxes.pop()
    setting.failed(PeerLost, "^rank 2 finished while rank 0 waits for a message of it$")


def test_who_waits_for_what_is_on_its_way_is_not() -> None:
    """Nor who waits for room, or no longer."""
    setting = entered(2)
    setting.say(1, parcel(0, b"one"))
    setting.say(0, awaits(1, parcels=0))
    setting.say(1, goodbye_message())
    setting.say(0, awaits(1, over=True))
    setting.say(0, awaits(1, parcels=1, room=True))
    assert setting.group.failure is None
    setting.say(0, awaits(1, parcels=1))
    assert isinstance(setting.group.failure, PeerLost)


def test_a_silent_one_is_named_by_who_waits_for_its_message() -> None:
    stalled(waiting := waits_of(entered(3, timeout=0.3)), "1 did not take part", timeout=0.3)
    assert {inbox.asked[0] for inbox in waiting.inboxes} == {""}


def waits_of(setting: Setting) -> Setting:
    setting.say(0, awaits(1))
    return setting


def test_one_that_is_busy_is_waited_for_up_to_the_limit_and_told_of() -> None:
    clock = Clock()
    setting = waits_of(entered(2, timeout=10.0, wait_limit=25.0, clock=clock))
    for _ in range(6):
        clock.advance(4.0)
        setting.say(1, TrainerMessage(alive={}))
    assert setting.group.failure is None
    lines = [line for line in setting.inboxes[0].asked if line]
    assert lines == [f"rank 0 waits for rank 1, for {seconds} s; it is alive" for seconds in (12, 24)]
    clock.advance(4.0)
    setting.failed(PeerStalled, "^rank 1 did not take part for 25 s; it is alive, but slower than --wait-limit")


def test_all_that_wait_for_one_another_are_told_so() -> None:
    clock = Clock()
    setting = waits_of(entered(2, timeout=10.0, clock=clock))
    setting.say(1, awaits(0))
    for _ in range(2):
        clock.advance(6.0)
        for rank in (0, 1):
            setting.say(rank, TrainerMessage(alive={}))
    words = "^rank 0, 1 did not take part for 10 s; every rank waits for another one: their calls differ$"
    setting.failed(PeerStalled, words)


def test_who_waits_for_what_is_on_its_way_does_not_wait_for_another_one() -> None:
    clock = Clock()
    setting = waits_of(entered(2, timeout=10.0, wait_limit=25.0, clock=clock))
    setting.say(0, parcel(1, b"for rank 1"))
    setting.say(1, awaits(0, parcels=0))
    for _ in range(3):
        clock.advance(5.0)
        for rank in (0, 1):
            setting.say(rank, TrainerMessage(alive={}))
    assert setting.group.failure is None


def test_what_moves_has_no_limit() -> None:
    """Nor has who is not waited for any longer."""
    clock = Clock()
    setting = waits_of(entered(3, timeout=10.0, wait_limit=25.0, clock=clock))
    for number in range(5):
        clock.advance(9.0)
        setting.say(2, parcel(0, b"x", number))
    setting.say(0, awaits(1, over=True))
    clock.advance(1000.0)
    assert setting.group.failure is None
