"""What a trainer takes of a server: every word of a step once, of its own epoch; else an error says what is wrong."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from common.errors import ChunkCorrupt, GradSyncError, PeerLost, PeerUnreachable, ProtocolError, StaleEpoch
from common.network.gradsync_pb2 import Chunk, Gather, Plane, Served, ServerMessage, StatePiece
from ps.client import inbox as inboxes
from ps.client.inbox import Inbox
from ps.planes.sealing import Sealing
from ps.store.shards import Shard

EPOCH, STEP = 2, 5


def inbox(kind: str = "grpc") -> Inbox:
    """At the end of step 5 of epoch 2; its server has words 16..48."""
    made = Inbox("server 0", threading.Condition(), EPOCH)
    made.begin(Shard(16, 48), np.zeros(64, np.float32))
    made.version = STEP - 1
    made.take(ServerMessage(plane=Plane(kind=kind)))
    return made


def words(start: int, stop: int, *, epoch: int = EPOCH) -> ServerMessage:
    return ServerMessage(parameters=Chunk(epoch=epoch, step=STEP, start=start, data=bytes(4 * (stop - start))))


def served(step: int = STEP, *, epoch: int = EPOCH) -> ServerMessage:
    return ServerMessage(served=Served(epoch=epoch, step=step))


def test_words_in_any_order_are_a_step() -> None:
    mine = inbox()
    for message in (words(32, 48), words(16, 32), served()):
        mine.take(message)
    assert mine.version == STEP


def test_in_shared_memory_no_words_come() -> None:
    mine = inbox("shm")
    mine.take(served())
    assert mine.version == STEP


STALE = "server 0 sent a message of epoch 1, this is epoch 2"
WRONG: dict[str, tuple[list[ServerMessage], type[GradSyncError], str]] = {
    "nothing": ([served()], ProtocolError, "server 0 sent elements 16..48 of step 5 never"),
    "the first missing": ([words(32, 48), served()], ProtocolError, "server 0 sent elements 16..32 of step 5 never"),
    "the last missing": ([words(16, 32), served()], ProtocolError, "server 0 sent elements 32..48 of step 5 never"),
    "twice": ([words(16, 48)] * 2 + [served()], ProtocolError, "server 0 sent elements 16..48 of step 5 twice"),
    "elsewhere": (
        [words(16, 32), words(24, 40), words(40, 48), served()],
        ProtocolError,
        "server 0 sent elements 24..32 of step 5 twice",
    ),
    "another step": ([words(16, 48), served(6)], ProtocolError, "server 0 served step 6, expected 5"),
    "words of an old epoch": ([words(16, 48, epoch=1)], StaleEpoch, STALE),
    "an end of an old epoch": ([words(16, 48), served(epoch=1)], StaleEpoch, STALE),
    "a gather of an old epoch": ([ServerMessage(gathered=Gather(epoch=1))], StaleEpoch, STALE),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_an_error(what: str) -> None:
    messages, kind, text = WRONG[what]
    mine = inbox()
    for message in messages[:-1]:
        mine.take(message)
    with pytest.raises(kind) as caught:
        mine.take(messages[-1])
    assert str(caught.value) == text
    assert mine.version == STEP - 1


def state(*, request: int, last: bool = True) -> ServerMessage:
    return ServerMessage(state=StatePiece(epoch=EPOCH, request=request, last=last, data=b"data"))


AGAIN = {
    "the plane": [ServerMessage(plane=Plane(kind="grpc"))],
    "a gather": [ServerMessage(gathered=Gather(epoch=EPOCH, sequence=0, size=4, data=b"data"))],
    "optimizer state": [state(request=1, last=False), state(request=1)],
}


@pytest.mark.parametrize("what", AGAIN)
@pytest.mark.parametrize("is_read", [True, False])
def test_an_answer_that_comes_again_answers_nothing_else(what: str, is_read: bool) -> None:
    """Else what is said through shared memory might overtake what was sent over gRPC meanwhile."""
    mine = inbox()
    assert mine.expect_state() == 1
    for message in AGAIN[what]:
        mine.take(message)
    assert not mine.unanswered
    came = mine.take_state() if is_read else []
    mine.has_sent()
    for message in AGAIN[what]:
        mine.take(message)
    assert mine.unanswered
    assert mine.gathered == ({0: b"data"} if what == "a gather" else {})
    assert len(came + mine.take_state()) == (2 if what == "optimizer state" else 0)


def test_optimizer_state_that_was_never_asked_for() -> None:
    mine = inbox()
    for request in (1, 2):
        with pytest.raises(ProtocolError, match="server 0 sent optimizer state that was not asked for"):
            mine.take(state(request=request))
        mine.expect_state()


def test_damage_is_told_where_messages_have_a_checksum() -> None:
    sealed = Sealing(on=True).seal(b"message")
    with pytest.raises(ChunkCorrupt) as caught:
        Sealing(on=True).unseal(b"M" + sealed[1:], "rank 1")
    assert str(caught.value) == (
        "data from rank 1 were damaged on their way (15 bytes whose checksum is another); look for a faulty network "
        "card or memory"
    )
    assert Sealing(on=False).seal(b"message") == Sealing(on=False).unseal(b"message", "rank 1") == b"message"


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_data_connection_that_ends_without_a_last_word(monkeypatch: pytest.MonkeyPatch, is_cut: bool) -> None:
    """Over a link that is cut it cannot come; whoever waits for the server says so, here while that is looked for."""
    made = Inbox("server 0", threading.Condition(), EPOCH, host="10.0.0.2")
    unreachable = PeerUnreachable("server 0 cannot be reached")

    def looks(host: str) -> bool:
        assert host == "10.0.0.2"
        if is_cut:
            made.fail(unreachable)
        return is_cut

    monkeypatch.setattr(inboxes, "is_cut_off", looks)
    monkeypatch.setattr(inboxes, "FAREWELL_S", 0.01)
    made.hung_up()
    if is_cut:
        assert made.error is unreachable
    else:
        assert isinstance(made.error, PeerLost)
        assert str(made.error) == "server 0 was lost while training (its data connection was closed)"
