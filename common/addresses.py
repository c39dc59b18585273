"""Addresses of this machine, and how others reach it."""

from __future__ import annotations

import socket

from common.config import parse_address
from common.errors import PeerUnreachable

__all__ = ["address_after", "address_of", "is_ours", "own_host"]


def address_of(host: str, port: int) -> str:
    """HOST:PORT, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def address_after(address: str, count: int) -> str:
    """The same host's address `count` ports further on.

    Raises:
        UsageError: there is no such port.
    """
    host, _, port = address.rpartition(":")
    return parse_address(f"{host}:{int(port) + count}")


def is_ours(host: str) -> bool:
    """Whether this machine has that address, or the one of that name."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError:  # also of a name that is not known
        return False
    return True


def own_host(peer: str) -> str:
    """The address of this machine by which the host `peer` (a number or a name) reaches it.

    Raises:
        PeerUnreachable: no way leads there, or the name is not known.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(peer.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # connecting a datagram socket sends nothing
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise PeerUnreachable(f"no way leads to {peer} ({exc.strerror}); is the address right?") from exc
