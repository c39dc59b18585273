"""Sockets between processes: set up for short messages, and polled many at a time."""

from __future__ import annotations

import math
import select
import socket
import sys
from contextlib import suppress

__all__ = ["KEPT_BYTES", "LOOPBACK", "host_of_peer", "keep_little", "on_loopback", "poll_readable", "tuned"]

MIN_RTT = 148  # where tcp_info of linux/tcp.h has tcpi_min_rtt, microseconds
LOOPBACK = ("127.0.0.1", "::1")
RENO = b"reno"  # every kernel has it; the pacing of BBR, some systems' usual one, only costs time without losses

KEPT_BYTES = 256 * 1024  # unread, of a connection's that is to hold its sender up soon
NEAR_S = KEPT_BYTES / 1.25e9  # of a round trip, in which a link of 10 Gbit/s brings no more


def tuned(connection: socket.socket) -> socket.socket:
    """The same connection, which now sends short messages at once."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if on_loopback(connection):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, RENO)
    return connection


def keep_little(connection: socket.socket, near: float = NEAR_S) -> None:
    """Have the kernel keep no more than KEPT_BYTES of what is not read, instead of ever more, so that a sender whom
    nobody reads from is held up soon. Between hosts that are not near that would cost speed, and is not done.

    Args:
        near: the longest round trip of near hosts, seconds.
    """
    if shortest_round_trip(connection) <= near:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KEPT_BYTES)


def shortest_round_trip(connection: socket.socket) -> float:
    """Of a TCP connection so far, seconds; infinite if the kernel does not tell, as before Linux 4.6."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < MIN_RTT + 4:
        return math.inf
    return int.from_bytes(info[MIN_RTT : MIN_RTT + 4], sys.byteorder) / 1e6


def on_loopback(connection: socket.socket) -> bool:
    """Whether both ends are on this host, as far as is known: nobody knows of a connection whose other end is gone."""
    try:
        return connection.family == socket.AF_UNIX or connection.getpeername()[0] in LOOPBACK
    except OSError:
        return False


def host_of_peer(connection: socket.socket) -> str:
    """The address of the other end; "" of a Unix socket, and where that end is gone."""
    with suppress(OSError):
        if connection.family != socket.AF_UNIX:
            return str(connection.getpeername()[0])
    return ""


def poll_readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those of the sockets that can be read within `seconds`; unlike `select`, of any descriptor number."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [each for each in sockets if each.fileno() in ready]
