"""The sockets between the ranks of a group: who calls whom, and for what."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Sequence

from collective.membership.direct_links import DirectLinks
from collective.membership.liveness import Mesh
from collective.membership.overlay import neighbours
from common.credentials.credentials import Credentials, current
from common.errors import PeerUnreachable, RendezvousError
from common.network.door import Door, listening
from common.network.patience import WAIT_LIMIT_S
from common.network.proofs import connect_to, seat_key
from common.system.memory import Unreachable

__all__ = ["Listener", "build_mesh"]

MESH, DATA, DIRECT = 0, 1, 2  # purposes of a connection
MOST_RANKS = 1 << 24
Wanted = tuple[int, int]  # (purpose, rank)


class Listener:
    """Where ranks connect that know the group's token and the job's credentials, on Unix sockets of this user's only; a
    context manager.

    Args:
        host: an address of this machine, for TCP; "": none.
        name: in Linux's abstract Unix namespace (no file, no port), which ends with the network namespace; "": none.
        credentials: None: this process's.
    """

    def __init__(self, host: str, name: str, credentials: Credentials | None = None) -> None:
        self.credentials = credentials or current()
        sockets: list[socket.socket] = []
        self.address, self.local_address = "", name
        if host:
            sockets.append(listening(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0)))
            self.address = f"{host} {sockets[0].getsockname()[1]}"
        if name:
            sockets.append(listening(socket.AF_UNIX, "\0" + name))
        self.door = Door(sockets, self.credentials)
        self.kept = False  # by a mesh, which closes it

    def close(self) -> None:
        self.door.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.kept:
            self.close()


def seat_of(wanted: Wanted) -> int:
    purpose, rank = wanted
    return purpose * MOST_RANKS + rank


def key_of(token: bytes, listener: int, credentials: Credentials) -> bytes:
    """Of the seats at that rank."""
    return seat_key(credentials, b"a rank", token, b"%d" % listener)


def call(
    rank: int, wanted: Wanted, address: str, token: bytes, credentials: Credentials, seconds: float
) -> socket.socket:
    """Connect to another rank's listener, by its address or local address.

    Raises:
        PeerUnreachable: it does not answer, or does not let this rank in.
        Unreachable: there is another user's.
    """
    purpose, other = wanted
    host, _, port = address.rpartition(" ")
    key, own = key_of(token, other, credentials), seat_of((purpose, rank))
    where = (host, int(port)) if host else port
    return connect_to(where, own, key, credentials, seconds, who=f"rank {rank}", peer=f"rank {other}")


def build_mesh(
    rank: int,
    addresses: Sequence[str],
    listener: Listener,
    token: bytes,
    *,
    data: Collection[int],
    near: Sequence[int] = (),
    timeout: float,
    wait_limit: float = WAIT_LIMIT_S,
) -> tuple[Mesh, dict[int, socket.socket]]:
    """Connect to every lower rank of this one's neighbours (overlay.py) and be called by every higher one; likewise, a
    second time, for data with the ranks that `data` names (which must name this one). Returns the mesh and the data
    connections.

    Args:
        addresses: of each rank's listener, or its local address if the two ranks share a host and are to share memory.
        listener: is kept, and closed by the mesh, where not all ranks are neighbours.
        near: the ranks with which this one shares memory, itself among them.

    Raises:
        RendezvousError: a rank that had joined did not connect within `timeout` seconds, or is another user's.
    """
    around = neighbours(rank, len(addresses), near, data)
    wanted = sorted([(MESH, r) for r in around] + [(DATA, r) for r in data])
    opened: dict[Wanted, socket.socket] = {}
    try:
        open_all(rank, wanted, addresses, listener, token, timeout, opened)
    except BaseException:
        for connection in opened.values():
            connection.close()
        raise
    connections = {r: opened[MESH, r] for r in around}
    direct = None
    if len(around) < len(addresses) - 1:
        direct = direct_links(rank, around, addresses, listener, token)
    mesh = Mesh(
        rank, connections, nranks=len(addresses), near=near, direct=direct, timeout=timeout, wait_limit=wait_limit
    )
    return mesh, {r: c for (purpose, r), c in sorted(opened.items()) if purpose == DATA}


def direct_links(
    rank: int, around: Collection[int], addresses: Sequence[str], listener: Listener, token: bytes
) -> DirectLinks:
    """Between this rank and all that are not around it."""
    seats = {seat_of((DIRECT, r)): r for r in range(len(addresses)) if r != rank and r not in around}
    credentials = listener.credentials
    listener.door.admit(dict.fromkeys(seats, key_of(token, rank, credentials)))
    listener.kept = True

    def open_one(other: int, seconds: float) -> socket.socket:
        return call(rank, (DIRECT, other), addresses[other], token, credentials, seconds)

    return DirectLinks(listener.door, seats, open_one, listener.close)


def open_all(
    rank: int,
    wanted: Sequence[Wanted],
    addresses: Sequence[str],
    listener: Listener,
    token: bytes,
    timeout: float,
    opened: dict[Wanted, socket.socket],
) -> None:
    """Fill `opened` with the connections that are wanted; raises as `build_mesh`."""
    deadline, credentials, door = time.monotonic() + timeout, listener.credentials, listener.door
    expected = {seat_of(each): each for each in wanted if each[1] > rank}
    door.admit(dict.fromkeys(expected, key_of(token, rank, credentials)))
    for each in wanted:
        _, other = each
        if other > rank:
            continue
        left = max(0.001, deadline - time.monotonic())
        try:
            opened[each] = call(rank, each, addresses[other], token, credentials, left)
        except Unreachable as exc:
            ranks = f"rank {rank} and rank {other}"
            raise RendezvousError(f"{ranks} cannot share memory: {exc}; use --backend tcp") from exc
        except PeerUnreachable as exc:
            raise RendezvousError(f"rank {other} at {addresses[other].strip().replace(' ', ':')} {exc}") from exc
    while expected:
        if not door.wait(expected, deadline):
            missing = ", ".join(str(r) for r in sorted({r for _, r in expected.values()}))
            raise RendezvousError(f"rank {missing} did not connect to rank {rank} within {timeout:g} s")
        for seat in list(expected):
            if connection := door.take(seat):
                opened[expected.pop(seat)] = connection
