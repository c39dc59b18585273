"""Where trainers open their data connections with a server, each for the seat that it was given when it joined.

Every rank has a seat for each model: model x nranks + rank. How it shows that the seat is its own is in
common/network/proofs.py; the key is the token that came with the seat, beside the job's credentials.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from common.credentials.credentials import Credentials, current
from common.errors import PeerUnreachable, PortInUse
from common.network.door import Door, listening
from common.network.proofs import HANDSHAKE_S, connect_to, seat_key
from common.network.sockets import LOOPBACK
from common.system.addresses import address_of

__all__ = ["HANDSHAKE_S", "DataPort", "Seats", "call"]

PURPOSE = b"a server's trainer"


def call(host: str, port: int, rank: int, token: bytes, seconds: float, *, seat: int, server: str) -> socket.socket:
    """Open a trainer's data connection with the server that has its port there.

    Args:
        token: that came with the seat.
        seconds: how long it may take.
        server: its name, for errors in what comes later.

    Raises:
        PeerUnreachable: why it cannot be had, in words.
    """
    mine = current()
    try:
        return connect_to(
            (host, port), seat, seat_key(mine, PURPOSE, token), mine, seconds, who=f"rank {rank}", peer=server
        )
    except PeerUnreachable as exc:
        raise PeerUnreachable(f"its data port {address_of(host, port)} {exc}") from exc


class DataPort:
    """Lets in who has a seat, once each; a context manager.

    Args:
        host: an address or name of this machine.
        port: 0: the system chooses.
        credentials: None: this process's.

    Raises:
        PortInUse: at construction.
    """

    def __init__(self, host: str, port: int, credentials: Credentials | None = None) -> None:
        self._credentials = credentials or current()
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = listening(family, where, again=True)
        except OSError as exc:
            raise PortInUse(
                f"cannot listen on data port {address_of(host, port)}: the port is in use or the address not ours; "
                "choose another --data-port"
            ) from exc
        home, self.port = listener.getsockname()[:2]
        self._near = home in LOOPBACK
        self._door = Door([listener], self._credentials)

    def more(self, first: int, tokens: Sequence[bytes]) -> Seats:
        """Further seats, from number `first` on."""
        keys = {first + rank: seat_key(self._credentials, PURPOSE, token) for rank, token in enumerate(tokens)}
        return Seats(self._door, self.port, keys, near=self._near)

    def close(self) -> None:
        """Nobody is let in any longer; idempotent."""
        self._door.close()

    def __enter__(self) -> DataPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Seats:
    """Those of one model's trainers at a data port.

    Args:
        keys: by seat, in the order of ranks.
        near: who comes is of this host.
    """

    def __init__(self, door: Door, port: int, keys: Mapping[int, bytes], *, near: bool) -> None:
        self.port, self.near = port, near
        self._door, self._seats = door, list(keys)
        door.admit(keys)

    def take(self, rank: int) -> socket.socket | None:
        """The connection that a rank has opened, once; None: it has none."""
        return self._door.take(self._seats[rank])

    def close(self) -> None:
        """Nobody is let in any longer; idempotent."""
        for seat in self._seats:
            self._door.remove(seat)
