"""Whether a host can be reached: its kernel acknowledges what it gets, whatever its processes do.

A frozen process is silent, but its kernel still acknowledges. Behind a cut link, and on a host that is down, nobody
does: what was sent stays unacknowledged, and TCP sends it again and again. Linux tells that of each connection: its
tcp_info (linux/tcp.h).

    frozen     asked for a sign of life    acknowledged        no answer     PeerStalled
    cut off    asked for a sign of life    never acknowledged                PeerUnreachable
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from common.errors import GradSyncError, PeerUnreachable

__all__ = ["TcpState", "host_at", "is_cut_off", "told_apart"]

RETRANSMITS, UNACKED, LAST_ACK = 2, 24, 56  # where tcp_info has them: a byte, and numbers of four
TRIES = 2  # a packet may get lost; after two waits that double TCP has heard nothing for 0.6 s at least
RECENT_MS = 1000  # an acknowledgement on another connection to that host


@dataclass(frozen=True)
class TcpState:
    """Of one connection: how often the same bytes were sent again in vain, how many packets are not acknowledged, and
    how long ago the last acknowledgement came."""

    tries: int
    unacknowledged: int
    last_ack_ms: int

    @property
    def lost(self) -> bool:
        return self.unacknowledged > 0 and self.tries >= TRIES

    @property
    def alive(self) -> bool:
        return self.last_ack_ms < RECENT_MS and not self.lost


def told_apart(error: GradSyncError, who: str, host: str, timeout: float) -> GradSyncError:
    """An error that says that somebody is silent; or a PeerUnreachable, where that is because nothing reaches its host.

    Args:
        who: is silent, as "rank 1".
        host: its address; "": it is on this host.
        timeout: how long it has been, at least, in seconds.
    """
    if not host or not is_cut_off(host):
        return error
    return PeerUnreachable(
        f"{who} cannot be reached: its host {host} has acknowledged nothing for {timeout:g} s (--timeout); the link to "
        "it is cut, or it is down"
    )


def is_cut_off(host: str) -> bool:
    """Whether what this process sends to that host, over whatever connection, is not acknowledged. Who asks must have
    sent something lately."""
    states = [state_of(info) for info in connections_to(host)]
    return any(state.lost for state in states) and not any(state.alive for state in states)


def state_of(info: bytes) -> TcpState:
    def number(at: int) -> int:
        return int.from_bytes(info[at : at + 4], sys.byteorder)

    return TcpState(tries=info[RETRANSMITS], unacknowledged=number(UNACKED), last_ack_ms=number(LAST_ACK))


def connections_to(host: str) -> Iterator[bytes]:
    """The tcp_info of each connection of this process to that host, gRPC's too, which does not tell its descriptors."""
    wanted = plain(host)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket, not connected, or gone meanwhile
            connection = socket.socket(fileno=int(name))
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    there = plain(connection.getpeername()[0])
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACK + 4)
                    if there == wanted and len(info) == LAST_ACK + 4:
                        yield info
            finally:
                connection.detach()


def plain(host: str) -> str:
    """An address in its shortest form: IPv4 as such where a socket for both has it. A name as its first address."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        with suppress(OSError):
            return plain(str(socket.getaddrinfo(host, None)[0][4][0]))
        return host
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)


def host_at(place: str) -> str:
    """Of what gRPC calls a peer, as "ipv4:10.0.0.2:50000", or of "host:port"; "" of a Unix socket."""
    kind, _, rest = place.partition(":")
    if kind.startswith("unix"):
        return ""
    address = rest if kind in ("ipv4", "ipv6") else place
    return address.replace("%5B", "[").replace("%5D", "]").rpartition(":")[0].strip("[]")
