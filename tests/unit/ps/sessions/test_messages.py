"""Who waits for a message of a trainer that leaves meanwhile, and who may not use a messenger."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from common.errors import PeerLost
from common.network.gradsync_pb2 import Awaiting
from ps.client.client import Client
from ps.coordinator.servicer import ParameterServer
from tests.support.commands import until
from tests.support.sessions import errors_of, serving


def waits(server: ParameterServer) -> dict[int, Awaiting]:
    relay = server._groups.first.coordinator._relay
    assert relay is not None
    return relay._waits


def test_who_leaves_after_a_message_on_another_channel_is_named() -> None:
    """Rank 1 has told the server for whom it waits before both come."""

    def body(rank: int) -> None:
        with closing(Client([server.address], rank, 2)) as client:
            if rank:
                client.messenger.receive(0, 5)
            else:
                until(lambda: waits(server), "rank 1 to wait")
                client.messenger.send(1, 6, b"of no use")

    with serving(2) as (server,):
        first, second = errors_of(2, body)
    assert first is None
    assert type(second) is PeerLost
    assert str(second) == "rank 0 finished while rank 1 waits for a message of it"


def test_who_has_got_its_message_does_not_wait_any_longer() -> None:
    def body(rank: int) -> None:
        with closing(Client([server.address], rank, 2)) as client:
            if rank:
                assert client.messenger.receive(0, 5) == b"late"
                until(lambda: not waits(server), "the server to know")
            else:
                until(lambda: waits(server), "rank 1 to wait")
                client.messenger.send(1, 5, b"late")

    with serving(2) as (server,):
        assert errors_of(2, body) == [None, None]


def test_all_models_of_a_trainer_have_the_first_ones_messenger() -> None:
    with serving(1) as (server,), Client([server.address], 0, 1) as client:
        further = client.another()
        assert further.messenger is further.another().messenger is client.messenger


@pytest.mark.parametrize("channel", [-1, 1 << 32])
def test_a_channel_that_cannot_be_is_refused(channel: int) -> None:
    def body(rank: int) -> None:
        with closing(Client([server.address], rank, 2)) as client:
            for call in (
                lambda: client.messenger.send(1 - rank, channel, b""),
                lambda: client.messenger.receive(1 - rank, channel),
            ):
                with pytest.raises(ValueError, match=rf"channel must be in 0\.\.4294967295 \(got {channel}\)"):
                    call()

    with serving(2) as (server,):
        assert errors_of(2, body) == [None, None]


def test_it_is_of_the_process_that_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(1) as (server,), Client([server.address], 0, 1) as client, monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(RuntimeError, match="from which this one was forked"):
            client.messenger.receive(0, 0)
