"""The sockets that a rank has with others of its group, and what comes by them, each for whom it is meant."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from collective.membership.direct_links import DirectLinks
from collective.membership.messages import Peer
from collective.membership.overlay import children
from common.network.sockets import poll_readable

__all__ = ["Ends"]

MOST_READS = 64  # of one rank's large message at a time


class Ends(ABC):
    """
    Args:
        connections: to this rank's neighbours.
        nranks: of the group; 0: all are neighbours.
        near: the ranks that share memory with this one, itself among them.
        direct: how it reaches those that are no neighbours.

    Attributes:
        peers: its neighbours, by rank.
    """

    def __init__(
        self,
        rank: int,
        connections: dict[int, socket.socket],
        nranks: int,
        near: Sequence[int],
        direct: DirectLinks | None,
    ) -> None:
        self.rank, self.nranks = rank, nranks or len(connections) + 1
        self.peers = {r: Peer(r, c, self._waited) for r, c in sorted(connections.items())}
        self._all_are_neighbours = len(self.peers) == self.nranks - 1
        self._near, self._direct = near, direct
        self._to: dict[int, Peer] = {}  # opened by this rank, for what it sends
        self._from: dict[int, Peer] = {}  # opened by others
        self._ends = [*self.peers.values()]
        self._lock = threading.RLock()  # over all but the mere waiting

    @property
    @abstractmethod
    def timeout(self) -> float:
        """How long a rank may give no sign of life, seconds."""

    @abstractmethod
    def _waited(self) -> float:
        """For how many seconds this rank has waited by now; 0: it does not."""

    @abstractmethod
    def _heard(self, end: Peer) -> None:
        """Something has come."""

    @property
    def sockets(self) -> list[socket.socket]:
        """To be polled beside a data socket; readable means `check`."""
        return [end.connection for end in self._ends if not end.left]

    def has_left(self, rank: int) -> bool:
        """Whether `rank` has said that its training is complete."""
        ends = [each[rank] for each in (self.peers, self._to, self._from) if rank in each]
        return any(end.left for end in ends)

    def way_from(self, rank: int) -> Peer | None:
        """By which messages of `rank` come; None: it has sent none yet, and is no neighbour."""
        return self.peers.get(rank) or self._from.get(rank)

    def carried(self, rank: int) -> int:
        """How many bytes of messages have come from `rank`."""
        end = self.way_from(rank)
        return end.carried if end else 0

    def offer(self, number: int, nbytes: int, descriptor: int) -> None:
        """Let all that share memory with this rank map a segment of its own (Unix sockets only)."""
        with self._lock:
            self._pass_on(self.rank, number, nbytes, descriptor)

    def _pass_on(self, owner: int, number: int, nbytes: int, descriptor: int) -> None:
        message = {"segment": number, "nbytes": nbytes, **({} if owner == self.rank else {"of": owner})}
        index, root = self._near.index(self.rank), self._near.index(owner)
        for each in children(index, root, len(self._near)):
            self.peers[self._near[each]].send(message, timeout=self.timeout, descriptors=[descriptor])

    def _segment_of(self, rank: int, number: int) -> tuple[int, int] | None:
        with self._lock:
            for peer in self.peers.values():
                if (rank, number) in peer.segments:
                    return peer.segments.pop((rank, number))
        return None

    def _present(self) -> list[Peer]:
        """The neighbours that have not left."""
        return [peer for peer in self.peers.values() if not peer.left]

    def _hear(self) -> None:
        for rank, connection in self._direct.arrived() if self._direct else ():
            self._from[rank] = self._new_end(rank, connection)
        readable = poll_readable(self.sockets, 0)
        for end in self._ends:
            if end.connection in readable:
                self._read(end)

    def _new_end(self, rank: int, connection: socket.socket) -> Peer:
        end = Peer(rank, connection, self._waited)
        self._ends.append(end)
        return end

    def _read(self, end: Peer) -> None:
        reads = 0
        while (end.read(timeout=self.timeout) and reads < MOST_READS) or end.has_more:
            reads += 1
        while end.passing:
            owner, number = end.passing.pop(0)
            if owner in self._near and (owner, number) in end.segments:
                descriptor, nbytes = end.segments[owner, number]
                self._pass_on(owner, number, nbytes, descriptor)
        self._heard(end)

    def forget(self) -> None:
        """Close this process's ends without a word: for a forked child, with whose ends open nobody would notice that
        the rank died."""
        for end in self._ends:
            end.connection.close()
        if self._direct:
            self._direct.forget()
