"""Who has a seat is let in at a data port, and nobody else; whoever comes ends nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from common.errors import PeerUnreachable, PortInUse
from ps.planes import data_port
from ps.planes.data_port import ANSWER, GREETING, MARK, DataPort, call, proof
from tests.support.sessions import DEADLINE_S

KEYS = [b"rank 0's token", b"rank 1's token"]
HOST = "127.0.0.1"


@pytest.fixture
def port() -> Iterator[DataPort]:
    with DataPort(HOST, 0, KEYS) as opened:
        yield opened


def dial(port: DataPort, rank: int, key: bytes) -> socket.socket:
    return call(HOST, port.port, rank, key, DEADLINE_S)


def assert_open(port: DataPort, rank: int = 0) -> None:
    """Who has a seat still gets it, and what is said there is heard."""
    with dial(port, rank, KEYS[rank]) as mine:
        theirs = port.take(rank)
        assert theirs is not None
        with theirs:
            mine.sendall(b"hello")
            theirs.settimeout(DEADLINE_S)
            assert theirs.recv(100) == b"hello"
            theirs.sendall(b"so do you")
            assert mine.recv(100) == b"so do you"


def test_who_has_a_seat_is_let_in(port: DataPort) -> None:
    for rank in (1, 0):
        assert_open(port, rank)


def test_what_is_not_there_cannot_be_taken(port: DataPort) -> None:
    assert port.take(0) is None
    with dial(port, 0, KEYS[0]):
        assert port.take(1) is None
        theirs = port.take(0)
        assert theirs is not None
        theirs.close()
        assert port.take(0) is None


@pytest.mark.parametrize(
    ("rank", "key"), [(0, KEYS[1]), (0, b""), (2, KEYS[0]), (2, bytes(16)), ((1 << 32) - 1, KEYS[0])]
)
def test_a_wrong_token_or_rank_is_turned_away(rank: int, key: bytes, port: DataPort) -> None:
    with pytest.raises(PeerUnreachable) as caught:
        dial(port, rank, key)
    text = f"its data port {HOST}:{port.port} did not let rank {rank} in (the connection was closed)"
    assert str(caught.value).replace("Connection reset by peer", "the connection was closed") == text
    assert_open(port)


def test_a_rank_comes_once(port: DataPort) -> None:
    with dial(port, 0, KEYS[0]):
        with pytest.raises(PeerUnreachable, match="did not let rank 0 in"):
            dial(port, 0, KEYS[0])
        assert_open(port, 1)


def stranger(port: DataPort, says: bytes) -> socket.socket:
    opened = socket.create_connection((HOST, port.port), DEADLINE_S)
    opened.sendall(says)
    return opened


@pytest.mark.parametrize("says", [b"\x16\x03\x01" + bytes(200), b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(ANSWER.size)])
def test_garbage_is_dropped_and_ends_nothing(says: bytes, port: DataPort) -> None:
    with stranger(port, says) as opened:
        assert_dropped(opened)
    assert_open(port)


def assert_dropped(opened: socket.socket) -> None:
    opened.settimeout(DEADLINE_S)
    try:
        while opened.recv(1000):
            pass
    except ConnectionResetError:
        pass


def test_what_was_overheard_cannot_be_said_again(port: DataPort) -> None:
    with socket.create_connection((HOST, port.port), DEADLINE_S) as honest:
        _, nonce = GREETING.unpack(honest.recv(GREETING.size))
        answer = ANSWER.pack(0, proof(KEYS[0], b"trainer", 0, nonce))
    with stranger(port, answer) as opened:
        assert_dropped(opened)
    assert_open(port)


def test_who_says_nothing_or_a_part_holds_nobody_up_and_is_dropped(
    port: DataPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_port, "HELLO_S", 0.2)
    silent = [stranger(port, b"\0" * (number % 3)) for number in range(20)]
    assert_open(port)
    for each in silent:
        assert_dropped(each)
        each.close()


def test_of_many_who_say_nothing_the_first_makes_room(port: DataPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_port, "MOST_CALLERS", 3)
    silent = [stranger(port, b"") for _ in range(4)]
    assert_dropped(silent[0])
    assert_open(port)
    for each in silent:
        each.close()


def test_it_closes_while_callers_are_silent() -> None:
    with DataPort(HOST, 0, KEYS) as port:
        waiting = stranger(port, b"\0")
    assert_dropped(waiting)
    waiting.close()
    port.close()


def test_a_port_in_use_is_an_error_that_names_it(port: DataPort) -> None:
    with pytest.raises(PortInUse) as caught:
        DataPort(HOST, port.port, KEYS)
    assert str(caught.value) == (
        f"cannot listen on data port {HOST}:{port.port}: the port is in use or the address not ours; "
        "choose another --data-port"
    )


# ---- what a trainer may meet instead -------------------------------------------------------------------------------


def answered_by(answer: Callable[[socket.socket], None], *, seconds: float = DEADLINE_S) -> str:
    """What a trainer's call ends with where somebody else answers."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(PeerUnreachable) as caught:
            call(HOST, listener.getsockname()[1], 3, b"key", seconds)
        thread.join()
        return str(caught.value).replace(f"{HOST}:{listener.getsockname()[1]}", "there")


def read_to_the_end(connection: socket.socket) -> None:
    connection.settimeout(DEADLINE_S)
    while connection.recv(1000):
        pass


def test_another_service_is_told_nothing() -> None:
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        connection.sendall(b"220 mail.example.com")
        heard.append(connection.recv(1000))

    assert answered_by(answer) == "its data port there did not let rank 3 in (somebody else answers there)"
    assert heard == [b""]


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(GREETING.pack(MARK, bytes(16)))
        assert len(connection.recv(ANSWER.size, socket.MSG_WAITALL)) == ANSWER.size
        connection.sendall(bytes(32))

    assert answered_by(answer) == "its data port there did not let rank 3 in (somebody else answers there)"


def test_a_server_that_says_nothing_is_waited_for_no_longer_than_the_limit() -> None:
    begin = time.monotonic()
    assert answered_by(read_to_the_end, seconds=0.3) == "its data port there did not let rank 3 in (timed out)"
    assert 0.3 <= time.monotonic() - begin < DEADLINE_S / 2


def test_where_nobody_listens_the_error_says_so(port: DataPort) -> None:
    number = port.port
    port.close()
    with pytest.raises(PeerUnreachable) as caught:
        call(HOST, number, 0, b"", 5.0)
    assert str(caught.value) == f"its data port {HOST}:{number} was not reached within 5 s (Connection refused)"
