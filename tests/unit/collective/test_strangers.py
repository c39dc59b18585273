"""Strangers and impostors where ranks meet: they neither get in, nor end or delay the meeting."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import pytest

from collective.membership.connections import DATA, MESH, Listener, build_mesh, call, key_of, seat_of
from collective.membership.liveness import Mesh
from common.credentials.credentials import Credentials, current
from common.errors import PeerUnreachable, RendezvousError
from tests.support.credentials import encrypted, with_secret
from tests.support.crowds import Crowd
from tests.support.groups import on_threads, outcomes_of

HOST, NRANKS = "127.0.0.1", 3
TOKEN = secrets.token_bytes(16)
DEADLINE_S = 20.0


@pytest.fixture(params=["plain", "TLS"])
def listeners(request: pytest.FixtureRequest) -> Iterator[list[Listener]]:
    with encrypted() if request.param == "TLS" else nullcontext(), ExitStack() as stack:
        yield [stack.enter_context(Listener(HOST, "")) for _ in range(NRANKS)]


def ports_of(listeners: list[Listener]) -> list[int]:
    return [int(each.address.partition(" ")[2]) for each in listeners]


def meet(listeners: list[Listener]) -> None:
    """Each rank hears of all others that they leave, over the mesh, and a byte of all data connections."""

    def body(rank: int) -> None:
        addresses = [each.address for each in listeners]
        others = [other for other in range(NRANKS) if other != rank]
        mesh, data = build_mesh(rank, addresses, listeners[rank], TOKEN, data=others, timeout=DEADLINE_S)
        for other, connection in data.items():
            connection.settimeout(DEADLINE_S)
            connection.sendall(bytes([10 * rank + other]))
        for other, connection in data.items():
            assert connection.recv(1) == bytes([10 * other + rank])
            connection.close()
        heard_of_all(mesh)
        mesh.close()

    on_threads(NRANKS, body)


def heard_of_all(mesh: Mesh) -> None:
    for other in mesh.peers:
        mesh.tell(other, [mesh.rank])
    for other in mesh.peers:
        deadline = time.monotonic() + DEADLINE_S
        while (note := mesh.told(other)) is None:
            assert time.monotonic() < deadline
        assert note == [other]


def test_a_crowd_does_not_keep_ranks_from_meeting(listeners: list[Listener]) -> None:
    threads = threading.active_count()
    with Crowd(ports_of(listeners), 170):
        assert threading.active_count() <= threads  # some of another test's may have ended
        begin = time.monotonic()
        meet(listeners)
        assert time.monotonic() - begin < 5.0


def test_an_impostor_takes_no_seat(listeners: list[Listener]) -> None:
    """One with other credentials, with another token, or for a seat that is not to be taken there."""
    listeners[0].door.admit({seat_of((MESH, 1)): key_of(TOKEN, 0, current())})
    cases: list[tuple[int, int, bytes, Credentials]] = [
        (1, MESH, TOKEN, with_secret(9)),
        (1, MESH, bytes(16), current()),
        (1, DATA, TOKEN, current()),
        (2, MESH, TOKEN, current()),
    ]
    for rank, purpose, token, credentials in cases:
        with pytest.raises(PeerUnreachable, match=f"did not let rank {rank} in"):
            call(rank, (purpose, 0), listeners[0].address, token, credentials, DEADLINE_S)
    rest = [(DATA, 1), (MESH, 2), (DATA, 2)]  # a door that takes some already refuses those that come before their time
    listeners[0].door.admit({seat_of(each): key_of(TOKEN, 0, current()) for each in rest})
    meet(listeners)


def test_who_is_refused_says_by_whom_and_why(listeners: list[Listener]) -> None:
    addresses = [each.address for each in listeners[:2]]

    def body(rank: int) -> None:
        tokens = [TOKEN, bytes(16)]
        build_mesh(rank, addresses, listeners[rank], tokens[rank], data=(), timeout=0.5)

    there, away = (outcome.error for outcome in outcomes_of(2, body))
    assert type(there) is type(away) is RendezvousError
    assert str(there) == "rank 1 did not connect to rank 0 within 0.5 s"
    assert str(away).startswith(f"rank 0 at {addresses[0].replace(' ', ':')} did not let rank 1 in (")


def test_a_port_that_somebody_else_has_taken_is_told_nothing_that_is_of_use(listeners: list[Listener]) -> None:
    """What it is sent differs each time, and holds neither the token nor a key."""
    heard: list[bytes] = []
    with socket.create_server((HOST, 0)) as impostor:

        def answer() -> None:
            for _ in range(2):
                connection, _ = impostor.accept()
                with connection:
                    connection.settimeout(0.3)
                    connection.sendall(b"GSD2" + bytes(16))
                    heard.append(b"")
                    try:
                        while data := connection.recv(1000):
                            heard[-1] += data
                    except OSError:
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        for _ in range(2):
            with pytest.raises(PeerUnreachable):
                call(1, (MESH, 0), f"{HOST} {impostor.getsockname()[1]}", TOKEN, current(), DEADLINE_S)
        thread.join()
    assert heard[0] != heard[1]
    assert not any(secret in each for each in heard for secret in (TOKEN, key_of(TOKEN, 0, current())))
    assert len(listeners) == NRANKS
