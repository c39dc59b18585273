"""One socket from every rank to every other: who is alive, why a rank left, who is stuck.

Data does not pass here. Messages are small JSON objects, length first:

    {"leave": reason}                    I am going: training is complete (reason ""), or I failed
    {"leave": reason, "because": [kind, text, rank]}   ... because of another rank, with the error that says so
    {"waiting?": n} / {"waiting!": n}    are you blocked in a wait? / yes (only a rank that is waiting can answer)
    {"note": [numbers]}                  what the algorithm above has to say to this rank
    {"segment": id, "nbytes": n}         a piece of my memory; its descriptor comes with the message (Unix sockets)

A socket that closes without a `leave` is a process that died: everyone who waits learns it at once, and which.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, overload

from common.errors import GradSyncError, LayoutMismatch, PeerLost, PeerStalled, RendezvousError, error_from_name
from common.system.handover import check_user, receive
from common.system.memory import Unreachable
from common.system.process import forget_in_children

__all__ = ["Listener", "Mesh", "build_mesh", "on_loopback", "poll_readable"]

LENGTH = struct.Struct("<I")
HELLO = struct.Struct("<16sHI")  # token, purpose, rank
MESH, DATA = 0, 1  # purposes of a connection
HELLO_S = 1.0  # how long a new connection may take to say who it is
ANSWER_S = 0.5  # how long a waiting rank may take to say so
READ_BYTES = 65_536
LOOPBACK = ("127.0.0.1", "::1")
RENO = (
    b"reno"  # every kernel has it; where nothing is lost, the pacing of BBR, some systems' usual one, only costs time
)


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


def tuned(connection: socket.socket) -> socket.socket:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if on_loopback(connection):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, RENO)
    return connection


def on_loopback(connection: socket.socket) -> bool:
    """Whether both ends are on this host."""
    return connection.family == socket.AF_UNIX or connection.getpeername()[0] in LOOPBACK


@dataclass
class Peer:
    """What this rank knows of another one."""

    rank: int
    connection: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    left: bool = False  # it said that its training is complete
    answered: bool = False  # to the last "waiting?"
    descriptors: deque[int] = field(default_factory=deque)  # received, not yet taken
    notes: deque[list[int]] = field(default_factory=deque)  # received, not yet taken
    segments: dict[int, tuple[int, int]] = field(default_factory=dict)  # id -> (descriptor, bytes), likewise


class Mesh:
    """The sockets of one rank. `check` and the waits raise PeerLost or PeerStalled naming the rank at fault."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], *, timeout: float) -> None:
        self.rank = rank
        self.timeout = timeout
        self.peers = {r: Peer(r, c) for r, c in sorted(connections.items())}
        self._failure: GradSyncError | None = None
        self._culprit = -1
        self._closed = False
        for peer in self.peers.values():
            peer.connection.setblocking(False)
        forget_in_children(self)

    def has_left(self, rank: int) -> bool:
        """Whether `rank` has said that its training is complete."""
        return self.peers[rank].left

    @property
    def sockets(self) -> list[socket.socket]:
        """To be polled beside a data socket; readable means `check`."""
        return [p.connection for p in self.peers.values() if not p.left]

    def check(self, needed: int | None = None, doing: str = "") -> None:
        """Read what has arrived and raise if the group cannot go on.

        Args:
            needed: a rank without which the caller cannot go on; also its orderly leaving is then an error.
        """
        readable = poll_readable(self.sockets, 0)
        for peer in self.peers.values():
            if peer.connection in readable:
                self._read(peer)
        if self._failure:
            raise self._failure
        if needed is not None and self.peers[needed].left:
            raise self._fail(PeerLost(f"rank {needed} finished while rank {self.rank} was still {doing}"), needed)

    @overload
    def stalled(self, suspect: int, doing: str) -> GradSyncError: ...

    @overload
    def stalled(self, suspect: int | None, doing: str) -> GradSyncError | None: ...

    def stalled(self, suspect: int | None, doing: str) -> GradSyncError | None:
        """The error for a wait on `suspect` that outlasted the timeout: find who does not even wait, and name it.

        A rank that waits for another one is not to blame, so every rank is asked whether it waits. Without a suspect
        nobody may be to blame: None.
        """
        for peer in self.peers.values():
            peer.answered = peer.left
            self._send(peer, {"waiting?": 1})
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and not all(p.answered for p in self.peers.values()):
            poll_readable(self.sockets, 0.05)
            try:
                self.check()
            except GradSyncError as exc:
                return exc
        silent = [p.rank for p in self.peers.values() if not p.answered]
        culprit = suspect if suspect in silent or not silent else silent[0]
        if culprit is None:
            return None
        return self._fail(
            PeerStalled(
                f"rank {culprit} did not take part for {self.timeout:g} s (rank {self.rank} was {doing}); "
                "it is frozen or slower than --timeout allows"
            ),
            culprit,
        )

    def tell(self, rank: int, note: list[int]) -> None:
        """Send numbers to `rank`, for its `told`."""
        self._send(self.peers[rank], {"note": note})

    def told(self, rank: int) -> list[int] | None:
        """The next numbers that `rank` sent; None if there are none yet. Never blocks; raises like `check`."""
        peer = self.peers[rank]
        if not peer.notes and not peer.left:
            self._read(peer)
        if self._failure:
            raise self._failure
        return peer.notes.popleft() if peer.notes else None

    def share(self, rank: int, number: int, nbytes: int, descriptor: int) -> None:
        """Let `rank` map a segment of this rank's memory (Unix sockets only)."""
        self._send(self.peers[rank], {"segment": number, "nbytes": nbytes}, [descriptor])

    def take_segment(self, rank: int, number: int, doing: str) -> tuple[int, int]:
        """(descriptor, bytes) of the segment that `rank` shared under this number; waits for it."""
        peer = self.peers[rank]
        deadline = time.monotonic() + self.timeout
        while number not in peer.segments:
            self.check(rank, doing)
            if number in peer.segments:
                break
            if time.monotonic() > deadline:
                raise self.stalled(rank, doing)
            poll_readable(self.sockets, 0.05)
        return peer.segments.pop(number)

    def forget(self) -> None:
        """Close this process's ends without a word: for a forked child, with whose ends open nobody would notice that
        the rank died."""
        self._closed = True
        for peer in self.peers.values():
            peer.connection.close()

    def close(self, reason: str = "") -> None:
        """Tell everyone that this rank leaves, and why if it failed, then close; never raises."""
        if self._closed:
            return
        self._closed = True
        message: dict[str, Any] = {"leave": reason}
        if self._failure:
            message["because"] = [type(self._failure).__name__, str(self._failure), self._culprit]
        for peer in self.peers.values():
            self._send(peer, message)
            peer.connection.close()
            for descriptor in [*peer.descriptors, *(d for d, _ in peer.segments.values())]:
                os.close(descriptor)

    def _send(self, peer: Peer, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        data = json.dumps(message).encode()
        framed = LENGTH.pack(len(data)) + data
        with suppress(OSError):  # it is gone: reading from it says so
            sent = 0
            with suppress(BlockingIOError):
                sent = peer.connection.send(framed) if not descriptors else 0
            if sent == len(framed):
                return
            peer.connection.settimeout(self.timeout)
            if descriptors:
                sent = socket.send_fds(peer.connection, [framed], descriptors)
            peer.connection.sendall(framed[sent:])
        with suppress(OSError):
            peer.connection.setblocking(False)

    def _read(self, peer: Peer) -> None:
        try:
            if peer.connection.family == socket.AF_UNIX:
                data, descriptors = receive(peer.connection, READ_BYTES, 16)
                peer.descriptors.extend(descriptors)
            else:
                data = peer.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.unread += data
        while len(peer.unread) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(peer.unread)
            if len(peer.unread) < LENGTH.size + size:
                break
            message = json.loads(peer.unread[LENGTH.size : LENGTH.size + size])
            del peer.unread[: LENGTH.size + size]
            self._handle(peer, message)
        if not data and not peer.left:
            self._fail(PeerLost(f"rank {peer.rank} died: its connection closed without a goodbye"), peer.rank)
            peer.left = True

    def _handle(self, peer: Peer, message: dict[str, Any]) -> None:
        if "note" in message:
            peer.notes.append(message["note"])
        elif "segment" in message:
            peer.segments[message["segment"]] = (peer.descriptors.popleft(), message["nbytes"])
        elif "waiting?" in message:
            self._send(peer, {"waiting!": 1})
        elif "waiting!" in message:
            peer.answered = True
        elif "leave" in message:
            peer.left = True
            if "because" in message:
                kind, text, culprit = message["because"]
                self._fail(error_from_name(kind, text), culprit)
            elif message["leave"]:
                kind, _, text = message["leave"].partition(": ")
                error = PeerLost(f"rank {peer.rank} left with {message['leave']}")
                self._fail(LayoutMismatch(text) if kind == LayoutMismatch.__name__ else error, peer.rank)

    def _fail(self, error: GradSyncError, culprit: int) -> GradSyncError:
        """Keep the first failure, and return it: later ones follow from it."""
        if self._failure is None:
            self._failure, self._culprit = error, culprit
        return self._failure


def poll_readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those of the sockets that can be read within `seconds`; unlike `select`, of any descriptor number."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [each for each in sockets if each.fileno() in ready]


def build_mesh(
    rank: int, addresses: Sequence[str], listener: Listener, token: bytes, *, data: Collection[int], timeout: float
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
    mesh = Mesh(rank, {r: c for (purpose, r), c in opened.items() if purpose == MESH}, timeout=timeout)
    return mesh, {r: c for (purpose, r), c in sorted(opened.items()) if purpose == DATA}
