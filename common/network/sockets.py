"""Sockets between processes: set up for short messages, and polled many at a time."""

from __future__ import annotations

import select
import socket

__all__ = ["on_loopback", "poll_readable", "tuned"]

LOOPBACK = ("127.0.0.1", "::1")
RENO = b"reno"  # every kernel has it; the pacing of BBR, some systems' usual one, only costs time without losses


def tuned(connection: socket.socket) -> socket.socket:
    """The same connection, which now sends short messages at once."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if on_loopback(connection):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, RENO)
    return connection


def on_loopback(connection: socket.socket) -> bool:
    """Whether both ends are on this host, as far as is known: nobody knows of a connection whose other end is gone."""
    try:
        return connection.family == socket.AF_UNIX or connection.getpeername()[0] in LOOPBACK
    except OSError:
        return False


def poll_readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those of the sockets that can be read within `seconds`; unlike `select`, of any descriptor number."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [each for each in sockets if each.fileno() in ready]
