"""The sockets between the ranks of a group: who calls whom, and how a rank that calls says who it is."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from collective.membership.liveness import Mesh
from common.errors import RendezvousError
from common.network.patience import WAIT_LIMIT_S
from common.network.sockets import poll_readable, tuned
from common.system.handover import check_user
from common.system.memory import Unreachable

__all__ = ["Listener", "build_mesh"]

HELLO = struct.Struct("<16sHI")  # token, purpose, rank
MESH, DATA = 0, 1  # purposes of a connection
HELLO_S = 1.0  # how long a new connection may take to say who it is


class Listener:
    """Accepts the connections of ranks that know the group's token, on Unix sockets of this user's only; a context
    manager.

    Args:
        host: an address of this machine, for TCP; "": none.
        name: in Linux's abstract Unix namespace (no file, no port), which ends with the network namespace; "": none.
    """

    def __init__(self, host: str, name: str) -> None:
        self._sockets: list[socket.socket] = []
        self.address, self.local_address = "", name
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listen(socket.socket(family, socket.SOCK_STREAM), (host, 0))
            self.address = f"{host} {self._sockets[0].getsockname()[1]}"
        if name:
            self._listen(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "\0" + name)

    def _listen(self, each: socket.socket, where: str | tuple[str, int]) -> None:
        self._sockets.append(each)
        each.bind(where)
        each.listen(128)
        each.setblocking(False)

    def accept(self, token: bytes, deadline: float) -> tuple[int, int, socket.socket]:
        """The next connection as (purpose, rank, socket); strangers are turned away.

        Raises:
            TimeoutError: none came before `deadline` (monotonic seconds).
        """
        while True:
            ready = poll_readable(self._sockets, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("timed out")
            connection, _ = ready[0].accept()
            hello = b""
            with suppress(OSError, Unreachable):  # a stranger who says nothing holds nobody up for long
                if connection.family == socket.AF_UNIX:
                    check_user(connection)
                connection.settimeout(max(0.001, min(HELLO_S, deadline - time.monotonic())))
                hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
            if len(hello) == HELLO.size and hello[:16] == token:
                _, purpose, rank = HELLO.unpack(hello)
                return purpose, rank, tuned(connection)
            connection.close()

    def close(self) -> None:
        for each in self._sockets:
            each.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dial(address: str, token: bytes, purpose: int, rank: int, deadline: float) -> socket.socket:
    """Connect to another rank's listener, by its address or local address, and say who calls.

    Raises:
        OSError: it does not answer.
        Unreachable: there is another user's.
    """
    host, _, port = address.rpartition(" ")
    timeout = max(0.001, deadline - time.monotonic())
    if host:
        connection = socket.create_connection((host, int(port)), timeout)
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        connection.connect("\0" + port)
        try:
            check_user(connection)
        except Unreachable:
            connection.close()
            raise
    connection.sendall(HELLO.pack(token, purpose, rank))
    return tuned(connection)


def build_mesh(
    rank: int,
    addresses: Sequence[str],
    listener: Listener,
    token: bytes,
    *,
    data: Collection[int],
    timeout: float,
    wait_limit: float = WAIT_LIMIT_S,
) -> tuple[Mesh, dict[int, socket.socket]]:
    """Connect to every lower rank and be called by every higher one; likewise, a second time, for data with the ranks
    that `data` names (which must name this one). Returns the mesh and the data connections.

    Args:
        addresses: of each rank's listener, or its local address if the two ranks share a host and are to share memory.

    Raises:
        RendezvousError: a rank that had joined did not connect within `timeout` seconds, or is another user's.
    """
    nranks, deadline = len(addresses), time.monotonic() + timeout
    wanted = {(MESH, r) for r in range(nranks) if r != rank} | {(DATA, r) for r in data}
    opened: dict[tuple[int, int], socket.socket] = {}
    try:
        for purpose, other in sorted(wanted):
            if other < rank:
                opened[purpose, other] = dial(addresses[other], token, purpose, rank, deadline)
        while len(opened) < len(wanted):
            purpose, other, connection = listener.accept(token, deadline)
            opened[purpose, other] = connection
    except (OSError, Unreachable) as exc:
        for connection in opened.values():
            connection.close()
        if isinstance(exc, Unreachable):
            ranks = f"rank {rank} and rank {other}"
            raise RendezvousError(f"{ranks} cannot share memory: {exc}; use --backend tcp") from exc
        missing = ", ".join(str(r) for r in sorted({r for _, r in wanted - opened.keys()}))
        raise RendezvousError(f"rank {missing} did not connect to rank {rank} within {timeout:g} s ({exc})") from exc
    connections = {r: c for (purpose, r), c in opened.items() if purpose == MESH}
    mesh = Mesh(rank, connections, timeout=timeout, wait_limit=wait_limit)
    return mesh, {r: c for (purpose, r), c in sorted(opened.items()) if purpose == DATA}
