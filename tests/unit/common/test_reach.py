"""A host that acknowledges nothing is told from one that does, by what the kernel says of the connections to it."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

import pytest

from common.errors import PeerStalled, PeerUnreachable
from common.network import reach
from common.network.reach import TcpState, host_at, is_cut_off, told_apart

SILENT = PeerStalled("rank 1 did not take part")
HOST = "10.0.0.2"


def info(tries: int = 0, unacknowledged: int = 0, last_ack_ms: int = 9000) -> bytes:
    """A tcp_info."""
    return struct.pack("=2xB21xI28xI", tries, unacknowledged, last_ack_ms)


@pytest.mark.parametrize(
    ("states", "cut"),
    [
        ([], False),
        ([info()], False),  # nothing was sent: nothing is known
        ([info(unacknowledged=1)], False),  # just sent
        ([info(tries=1, unacknowledged=1)], False),  # one packet may get lost
        ([info(tries=2, unacknowledged=1)], True),
        ([info(), info(tries=5, unacknowledged=3)], True),
        ([info(last_ack_ms=200), info(tries=5, unacknowledged=3)], False),  # another connection gets through
        ([info(tries=3, unacknowledged=1, last_ack_ms=900)], True),  # it was cut less than a second ago
        ([info(tries=3, last_ack_ms=9000)], False),  # a frozen one's window is closed: probes are acknowledged
    ],
)
def test_what_the_kernel_says_of_a_host(states: list[bytes], cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "connections_to", lambda host: iter(states if host == HOST else []))
    assert is_cut_off(HOST) is cut
    error = told_apart(SILENT, "rank 1", HOST, 3.0)
    if cut:
        assert isinstance(error, PeerUnreachable)
        assert str(error).startswith(
            f"rank 1 cannot be reached: its host {HOST} has acknowledged nothing for 3 s (--timeout); the link to it is"
        )
    else:
        assert error is SILENT
    assert told_apart(SILENT, "rank 1", "", 3.0) is SILENT


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_real_connection_whose_reader_is_frozen_is_acknowledged(family: socket.AddressFamily, host: str) -> None:
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as mine,
    ):
        theirs, _ = server.accept()  # and nobody reads
        with theirs:
            mine.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    mine.send(bytes(65536))
            (state, *_) = [reach.state_of(each) for each in reach.connections_to(host)]
            assert state.tries == 0
            assert not is_cut_off(host)
            assert mine.fileno() > 0  # looking has closed nothing
            mine.getpeername()


@pytest.mark.parametrize(
    ("place", "host"),
    [
        ("ipv4:10.0.0.2:50000", "10.0.0.2"),
        ("ipv6:%5Bfe80::1%5D:50000", "fe80::1"),
        ("ipv6:[::ffff:10.0.0.2]:50000", "::ffff:10.0.0.2"),
        ("unix:", ""),
        ("unix-abstract:name", ""),
        ("10.0.0.2:8500", "10.0.0.2"),
        ("[fe80::1]:8500", "fe80::1"),
    ],
)
def test_where_grpc_says_that_somebody_is(place: str, host: str) -> None:
    assert host_at(place) == host


def test_an_address_is_one_whatever_the_socket() -> None:
    assert reach.plain("::ffff:10.0.0.2") == reach.plain("10.0.0.2") == "10.0.0.2"
    assert reach.plain("localhost") in ("127.0.0.1", "::1")
    assert TcpState(tries=2, unacknowledged=1, last_ack_ms=0).lost
