"""Who has a seat is let in at a door, and nobody else; whoever comes ends nothing."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from common.credentials.credentials import Credentials
from common.errors import PeerUnreachable
from common.network import door as doors
from common.network import proofs, refusal_log
from common.network.door import Door, listening
from common.network.proofs import ANSWER, CLOSED, GREETING, Nonces, connect_to
from common.network.tls_sockets import is_encrypted
from tests.support.commands import until
from tests.support.credentials import with_secret

KEYS = {0: b"seat 0's key", 1: b"seat 1's key"}
HOST = "127.0.0.1"
DEADLINE_S = 20.0
OURS, OTHERS = with_secret(1), with_secret(2)
RESET = struct.pack("ii", 1, 0)


@pytest.fixture(params=["plain", "TLS"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(proofs, "ENCRYPT_LOOPBACK", request.param == "TLS")
    return str(request.param)


class Entry:
    """A door with a port."""

    def __init__(self, keys: dict[int, bytes] | None) -> None:
        listener = listening(socket.AF_INET, (HOST, 0))
        self.port: int = listener.getsockname()[1]
        self.door = Door([listener], OURS)
        if keys is not None:
            self.door.admit(keys)


@pytest.fixture
def entry(kind: str) -> Iterator[Entry]:
    made = Entry(KEYS)
    with made.door:
        yield made


def dial(entry: Entry, seat: int, key: bytes, credentials: Credentials = OURS) -> socket.socket:
    return connect_to((HOST, entry.port), seat, key, credentials, DEADLINE_S, who=f"rank {seat}", peer="rank 9")


def taken(entry: Entry, seat: int) -> socket.socket:
    assert entry.door.wait([seat], time.monotonic() + DEADLINE_S)
    connection = entry.door.take(seat)
    assert connection is not None
    connection.settimeout(DEADLINE_S)
    return connection


def assert_open(entry: Entry, seat: int = 0) -> None:
    """Who has a seat still gets it, and what is said there is heard."""
    with dial(entry, seat, KEYS[seat]) as mine, taken(entry, seat) as theirs:
        mine.sendall(b"hello")
        assert theirs.recv(5) == b"hello"
        theirs.sendall(b"so do you")
        assert mine.recv(9) == b"so do you"


def test_who_has_a_seat_is_let_in(entry: Entry, kind: str) -> None:
    for seat in (1, 0):
        assert_open(entry, seat)
    entry.door.admit(KEYS)
    with dial(entry, 0, KEYS[0]) as mine, taken(entry, 0) as theirs:
        assert is_encrypted(mine) == is_encrypted(theirs) == (kind == "TLS")


def test_what_is_not_there_cannot_be_taken(entry: Entry) -> None:
    assert entry.door.take(0) is None
    with dial(entry, 0, KEYS[0]):
        assert entry.door.take(1) is None
        taken(entry, 0).close()
        assert entry.door.take(0) is None


@pytest.mark.parametrize(
    ("seat", "key"), [(0, KEYS[1]), (0, b""), (2, KEYS[0]), (2, bytes(32)), ((1 << 32) - 1, KEYS[0])]
)
def test_a_wrong_key_or_seat_is_turned_away(seat: int, key: bytes, entry: Entry) -> None:
    with pytest.raises(PeerUnreachable) as caught:
        dial(entry, seat, key)
    assert str(caught.value) == f"did not let rank {seat} in ({CLOSED})"
    assert_open(entry)


def test_a_seat_is_taken_once(entry: Entry) -> None:
    with dial(entry, 0, KEYS[0]):
        with pytest.raises(PeerUnreachable, match="did not let rank 0 in"):
            dial(entry, 0, KEYS[0])
        assert_open(entry, 1)


def test_a_seat_that_was_removed_is_nobodys(entry: Entry) -> None:
    with dial(entry, 0, KEYS[0]):
        taken(entry, 0).close()
    entry.door.remove(1)
    with pytest.raises(PeerUnreachable, match="did not let rank 1 in"):
        dial(entry, 1, KEYS[1])


def test_who_calls_before_the_keys_are_known_is_let_in_then(kind: str) -> None:
    entry, come = Entry(None), threading.Event()
    with entry.door, ExitStack() as stack:

        def call() -> None:
            come.set()
            stack.enter_context(dial(entry, 1, KEYS[1]))

        caller = threading.Thread(target=call)
        caller.start()
        come.wait(DEADLINE_S)
        until(lambda: any(each.has_answered for each in list(entry.door._callers.values())), "its answer")
        assert not entry.door.wait([1], time.monotonic())
        entry.door.admit(KEYS)
        caller.join()
        taken(entry, 1).close()


# ---- strangers ------------------------------------------------------------------------------------------------------


def stranger(entry: Entry, says: bytes) -> socket.socket:
    opened = socket.create_connection((HOST, entry.port), DEADLINE_S)
    opened.sendall(says)
    return opened


def assert_dropped(opened: socket.socket) -> None:
    opened.settimeout(DEADLINE_S)
    try:
        while opened.recv(1000):
            pass
    except ConnectionResetError:
        pass


GARBAGE = [b"\x16\x03\x01" + bytes(200), b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(ANSWER.size), b"\xff" * 100_000]


@pytest.mark.parametrize("says", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_dropped_and_ends_nothing(says: bytes, entry: Entry) -> None:
    with socket.create_connection((HOST, entry.port), DEADLINE_S) as opened:
        with suppress(ConnectionError):  # it has not read all of it
            opened.sendall(says)
        assert_dropped(opened)
    assert_open(entry)


def test_other_credentials_do_not_open_though_the_key_is_right(entry: Entry, kind: str) -> None:
    """Certificates of TLS; the proof's own key is by the credentials, too (`seat_key`)."""
    if kind == "plain":
        ours, others = (proofs.seat_key(each, b"a rank", b"token") for each in (OURS, OTHERS))
        assert ours != others
        return
    with pytest.raises(PeerUnreachable, match=r"did not let rank 0 in \(its certificate is not of this job: "):
        dial(entry, 0, KEYS[0], OTHERS)
    assert_open(entry)


def test_without_a_certificate_nobody_gets_as_far_as_to_be_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "ENCRYPT_LOOPBACK", True)

    def bare(_: Credentials) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=OURS.identity.authority.decode())
        return context

    monkeypatch.setattr(Credentials, "client_context", bare)
    entry = Entry(KEYS)
    with entry.door:
        with pytest.raises(PeerUnreachable, match="certificate required"):
            dial(entry, 0, KEYS[0])
        assert entry.door.take(0) is None


def test_what_was_overheard_cannot_be_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even on the same ports, were the nonce the same it would be."""
    entry = Entry(KEYS)
    with entry.door:
        # An address of its own: nobody else's connection can take the port meanwhile.
        with socket.create_connection((HOST, entry.port), DEADLINE_S, source_address=("127.86.4.2", 0)) as honest:
            _, nonce = GREETING.unpack(honest.recv(GREETING.size))
            own = honest.getsockname()
            nonces = Nonces(nonce, ports=(entry.port, own[1]))
            answer = ANSWER.pack(0, nonces.caller, nonces.proof(KEYS[0], b"caller", 0))
            honest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)  # else the port is taken for a minute
        with socket.socket() as opened:
            opened.bind(own)
            opened.connect((HOST, entry.port))
            opened.sendall(answer)
            assert_dropped(opened)
        assert_open(entry)
    monkeypatch.setattr("common.network.door.secrets.token_bytes", lambda count: nonce[:count])
    entry = Entry(KEYS)
    with entry.door, stranger(entry, answer) as opened:
        assert_dropped(opened)  # other ports


def test_who_passes_on_what_others_say_gets_nowhere() -> None:
    """A listener in between, on a port of its own."""
    entry = Entry(KEYS)
    with entry.door, socket.create_server((HOST, 0)) as between:

        def pass_on() -> None:
            caller, _ = between.accept()
            with caller, socket.create_connection((HOST, entry.port), DEADLINE_S) as away:
                caller.sendall(away.recv(GREETING.size, socket.MSG_WAITALL))
                away.sendall(caller.recv(ANSWER.size, socket.MSG_WAITALL))
                assert_dropped(away)

        thread = threading.Thread(target=pass_on)
        thread.start()
        with pytest.raises(PeerUnreachable, match="did not let rank 0 in"):
            connect_to((HOST, between.getsockname()[1]), 0, KEYS[0], OURS, DEADLINE_S, who="rank 0", peer="")
        thread.join()
        assert_open(entry)


def hello_of_tls(entry: Entry) -> bytes:
    """The first half of a handshake."""
    outgoing = ssl.MemoryBIO()
    opened = OURS.client_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="gradsync")
    with pytest.raises(ssl.SSLWantReadError):
        opened.do_handshake()
    return outgoing.read() if proofs.ENCRYPT_LOOPBACK else b"\0" * (entry.port % ANSWER.size)


def test_who_says_nothing_or_a_part_holds_nobody_up_and_is_dropped(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "HANDSHAKE_S", 0.3)
    hello = hello_of_tls(entry)
    silent = [stranger(entry, part) for part in (b"", hello[:1], hello[:-1], hello) for _ in range(5)]
    assert_open(entry)
    for each in silent:
        assert_dropped(each)
        each.close()
    assert not entry.door._callers


def test_of_many_who_say_nothing_the_first_of_the_crowd_makes_room(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "MOST_CALLERS", 4)
    with socket.socket() as alone:
        alone.bind(("127.0.0.2", 0))
        alone.connect((HOST, entry.port))
        silent = [stranger(entry, b"") for _ in range(4)]
        assert_dropped(silent[0])
        assert_open(entry)
        assert len(entry.door._callers) <= 4
        assert "127.0.0.2" in {each.home for each in entry.door._callers.values()}
        for each in silent:
            each.close()


def test_five_hundred_who_say_nothing_hold_no_thread_and_keep_nobody_out(entry: Entry) -> None:
    threads = threading.active_count()
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(stranger(entry, b""))
        assert_open(entry)
        assert threading.active_count() <= threads
        assert len(entry.door._callers) <= doors.MOST_CALLERS


def test_it_closes_while_callers_are_silent() -> None:
    entry = Entry(KEYS)
    with entry.door:
        waiting = stranger(entry, b"\0")
    assert_dropped(waiting)
    waiting.close()
    entry.door.admit({7: b"a key"})  # of a model that comes too late
    entry.door.close()


# ---- what is told of them -------------------------------------------------------------------------------------------


def test_who_is_turned_away_is_told_at_once_and_a_crowd_in_one_line(
    entry: Entry, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ""
    for _ in range(9):
        with stranger(entry, bytes(200)) as opened:
            assert_dropped(opened)
        said = said or str(until(lambda: capfd.readouterr().err, "a line about the first"))
    where = f"gradsync: {HOST}:{entry.port} turned away "
    assert said == f"{where}a caller from {HOST}: {doors.NO_PROOF}\n"
    assert capfd.readouterr().err == ""
    entry.door.close()
    assert capfd.readouterr().err == f"{where}8 callers, the last from {HOST}: {doors.NO_PROOF}\n"


def test_a_line_a_minute_tells_of_a_crowd(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [100.0]
    monkeypatch.setattr(refusal_log.time, "monotonic", lambda: clock[0])
    told = refusal_log.Refusals("here")
    for second in range(130):
        clock[0] = 100.0 + second
        told.note("10.0.0.9", "no proof")
    told.close()
    told.close()
    assert capsys.readouterr().err.splitlines() == [
        "gradsync: here turned away a caller from 10.0.0.9: no proof",
        "gradsync: here turned away 60 callers, the last from 10.0.0.9: no proof",
        "gradsync: here turned away 60 callers, the last from 10.0.0.9: no proof",
        "gradsync: here turned away 9 callers, the last from 10.0.0.9: no proof",
    ]


def test_a_member_that_is_let_in_is_not_told_of(entry: Entry, capfd: pytest.CaptureFixture[str]) -> None:
    assert_open(entry)
    entry.door.close()
    assert capfd.readouterr().err == ""
