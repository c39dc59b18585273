"""A trainer that dies, is frozen or is busy, while another waits for its message, for room, or in another model."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.errors import PeerLost, PeerStalled
from common.tensors.arena import Arena, Layout
from ps.client.client import Client
from ps.coordinator.servicer import ParameterServer
from ps.planes.parcels import ROOM_BYTES
from tests.support.groups import DEADLINE_S, ROOT, environment

pytestmark = pytest.mark.processes

LIMIT_S = 2.0  # the timeout
NOTICE_S = 1.0
MIB = 1 << 20

TRAINER = """
import sys, time
from ps.client.client import Client
from tests.processes.ps.test_messages_and_models import arena_of

with Client([sys.argv[1]], 1, 2) as client:
    further = client.another()
    for each in (client, further):
        each.register(arena_of(each), None)
    client.messenger.send(0, 0, b"here")
    if sys.argv[2] == "busy":
        end = time.monotonic() + float(sys.argv[3])
        while time.monotonic() < end:
            sum(range(1000))
        client.messenger.send(0, 1, b"there")
    client.messenger.receive(0, 0)
"""


def arena_of(client: Client) -> Arena:
    return Arena(Layout.of([("w", (1000,))]), empty=client.empty)


@contextmanager
def beside(*does: object) -> Iterator[tuple[Client, Client, subprocess.Popen[bytes]]]:
    """The test is rank 0; rank 1 is a process, which has joined for two models and said so."""
    with ParameterServer("127.0.0.1:0", 2, timeout=30.0) as server:
        command = [sys.executable, "-c", TRAINER, server.address, *(str(each) for each in does)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment())
        client = Client([server.address], 0, 2)
        try:
            further = client.another()
            for each in (client, further):
                each.register(arena_of(each), None)
            assert client.messenger.receive(1, 0) == b"here"
            for group in (server._groups.first, *server._groups._further.values()):
                group.coordinator.silence.patience.timeout = LIMIT_S
            yield client, further, process
        finally:
            process.kill()
            process.wait(DEADLINE_S)
            client.close("the test is over")


def waits_in_model_1(client: Client, further: Client) -> None:
    further.push(0)
    further.average()


def waits_for_a_message(client: Client, further: Client) -> None:
    client.messenger.receive(1, 9)


def waits_for_room(client: Client, further: Client) -> None:
    """Of what is sent no more leaves this process, and so is in the server's memory, than there is room for."""
    data, sent = bytes(MIB), 0
    try:
        for _ in range(10 * ROOM_BYTES // MIB):
            client.messenger.send(1, 3, data)
            sent += 1
    finally:
        assert sent < ROOM_BYTES // MIB


@pytest.mark.parametrize("waits", [waits_for_a_message, waits_in_model_1])
def test_a_trainer_that_dies_is_named_at_once(waits):
    with beside("nothing") as (client, further, process):
        began = time.monotonic()
        process.kill()
        with pytest.raises(PeerLost, match=r"^rank 1 died at step 0: its connection closed"):
            waits(client, further)
        assert time.monotonic() - began < NOTICE_S


@pytest.mark.parametrize(
    "waits",
    [waits_for_a_message, *(pytest.param(w, marks=pytest.mark.long) for w in (waits_for_room, waits_in_model_1))],
)
def test_a_trainer_that_is_stopped_is_named_at_the_timeout(waits):
    with beside("nothing") as (client, further, process):
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(PeerStalled, match=r"^rank 1 did not take part.* for 2 s; it gives no sign of life"):
            waits(client, further)
        assert LIMIT_S - 0.5 < time.monotonic() - began < LIMIT_S + 5.0


@pytest.mark.long
def test_a_trainer_that_is_busy_for_longer_than_the_timeout_is_waited_for(capfd):
    with beside("busy", 1.25 * LIMIT_S) as (client, _, process):
        assert client.messenger.receive(1, 1) == b"there"
        client.messenger.send(1, 0, b"")
        assert process.wait(DEADLINE_S) == 0
    assert "rank 0 waits for rank 1, for 2 s; it is alive" in capfd.readouterr().err
