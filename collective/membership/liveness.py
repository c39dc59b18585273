"""Who is alive, why a rank left, and who is stuck: told by one socket from every rank to every other.

Data does not pass here. A socket that closes without a `leave` (messages.py) is a process that died: everyone who
waits learns it at once, and which.
"""

from __future__ import annotations

import socket
import time
from typing import Any, overload

from collective.membership.messages import Peer
from common.errors import GradSyncError, PeerLost, PeerStalled
from common.network.sockets import poll_readable
from common.system.process import forget_in_children

__all__ = ["Mesh"]

ANSWER_S = 0.5  # how long a waiting rank may take to say so


class Mesh:
    """The sockets of one rank. `check` and the waits raise PeerLost or PeerStalled naming the rank at fault."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], *, timeout: float) -> None:
        self.rank, self.nranks = rank, len(connections) + 1
        self.timeout = timeout
        self.peers = {r: Peer(r, c) for r, c in sorted(connections.items())}
        self._failure: GradSyncError | None = None
        self._culprit = -1
        self._closed = False
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
            peer.send({"waiting?": 1}, timeout=self.timeout)
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
        self.peers[rank].send({"note": note}, timeout=self.timeout)

    def told(self, rank: int) -> list[int] | None:
        """The next numbers that `rank` sent; None if there are none yet. Never blocks; raises like `check`."""
        peer = self.peers[rank]
        if not peer.notes and not peer.left:
            self._read(peer)
        if self._failure:
            raise self._failure
        return peer.notes.popleft() if peer.notes else None

    def offer(self, rank: int, number: int, nbytes: int, descriptor: int) -> None:
        """Let `rank` map a segment of this rank's memory (Unix sockets only)."""
        message = {"segment": number, "nbytes": nbytes}
        self.peers[rank].send(message, timeout=self.timeout, descriptors=[descriptor])

    def take_segment(self, rank: int, number: int, doing: str) -> tuple[int, int]:
        """(descriptor, bytes) of the segment that `rank` offered under this number; waits for it."""
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
            peer.send(message, timeout=self.timeout)
            peer.close()

    def _read(self, peer: Peer) -> None:
        peer.read(timeout=self.timeout)
        if peer.failure:
            self._fail(*peer.failure)

    def _fail(self, error: GradSyncError, culprit: int) -> GradSyncError:
        """Keep the first failure, and return it: later ones follow from it."""
        if self._failure is None:
            self._failure, self._culprit = error, culprit
        return self._failure
