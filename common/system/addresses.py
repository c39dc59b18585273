"""Addresses: how they are written, which are this machine's, and how others reach it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from common.errors import PeerUnreachable, UsageError

__all__ = [
    "address_after",
    "address_of",
    "boot_id",
    "clock_identity",
    "host_identity",
    "is_ours",
    "own_host",
    "parse_address",
    "parse_addresses",
]


def parse_address(text: str) -> str:
    """Check a HOST:PORT (or a unix: address) and return it.

    Raises:
        UsageError: no port, or not a port number.
    """
    if text.startswith("unix"):
        return text
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"not an address: {text!r}; expected HOST:PORT, as in 127.0.0.1:8500")
    return text


def parse_addresses(text: str) -> Sequence[str]:
    """The addresses of a comma-separated list."""
    return tuple(parse_address(part.strip()) for part in text.split(","))


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


@cache
def boot_id() -> str:
    """Equal for processes of one running kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no such /proc: then nobody shares this host
        return secrets.token_hex(16)


def clock_identity() -> str:
    """Equal for processes that read one CLOCK_MONOTONIC: of one kernel and one time namespace."""
    namespace = Path("/proc/self/ns/time")  # since Linux 5.6
    return f"{boot_id()}/{namespace.stat().st_ino if namespace.exists() else ''}"


def host_identity(address: str) -> str:
    """What is equal for two processes exactly if abstract Unix sockets connect them: the kernel and the network
    namespace. Clones of a virtual machine may agree in both, but not in `address`, by which others reach this one."""
    try:
        return f"{address}/{boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no such /proc: then nobody shares this host
        return secrets.token_hex(16)
