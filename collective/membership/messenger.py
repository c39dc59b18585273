"""Messages between two ranks over the mesh's sockets: in pieces, so that signs of life pass between them."""

from __future__ import annotations

import select
import time

from collective.membership.liveness import Mesh
from collective.membership.messages import PIECE_BYTES, Peer
from common.sync.messenger import Messenger

__all__ = ["MeshMessenger"]

MOST_CHANNELS = 1 << 32
POLL_S = 0.05


class MeshMessenger(Messenger):
    """Who sends reads meanwhile, and keeps what comes, so that two who send to each other do not wait for each other.

    Args:
        mesh: is not closed here.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.rank, self.nranks = mesh.rank, mesh.nranks

    def send(self, to: int, channel: int, data: bytes | bytearray | memoryview) -> None:
        self._check("to", to, channel)
        view = memoryview(data).cast("B")
        self._mesh.way_to(to)  # before the thread that answers may rest
        with self._mesh.attended():
            for start in range(0, max(1, len(view)), PIECE_BYTES):
                last = start + PIECE_BYTES >= len(view)
                self._mesh.put_piece(to, channel, view[start : start + PIECE_BYTES], last=last)
                self._push(to)

    def _push(self, to: int) -> None:
        since = time.monotonic()
        while True:
            moved, done = self._mesh.push(to)
            if done:
                self._mesh.stop_waiting()
                return
            if moved:
                since = time.monotonic()
            self._mesh.wait_on(to, "sending", since)
            self._wait_for(self._mesh.way_to(to), select.POLLIN | select.POLLOUT)

    def receive(self, source: int, channel: int) -> bytearray:
        self._check("source", source, channel)
        doing = "waiting for a message"
        carried, since = self._mesh.carried(source), time.monotonic()
        with self._mesh.attended():
            while (message := self._mesh.take(source, channel, doing)) is None:
                if (by_now := self._mesh.carried(source)) != carried:
                    carried, since = by_now, time.monotonic()
                self._mesh.wait_on(source, doing, since)
                self._wait_for(self._mesh.way_from(source), select.POLLIN)
        self._mesh.stop_waiting()
        return message

    def comes(self, source: int, channel: int, seconds: float) -> bool:
        self._check("source", source, channel)
        end, doing = time.monotonic() + seconds, "looking for a message"
        with self._mesh.attended():
            while self._mesh.take(source, channel, doing, leave=True) is None:
                if time.monotonic() > end:
                    return False
                self._wait_for(self._mesh.way_from(source), select.POLLIN)
        return True

    def _wait_for(self, end: Peer | None, events: int) -> None:
        """Until that socket is ready, or another one can be read, for a moment."""
        wanted = end and end.connection
        poll = select.poll()
        for each in self._mesh.sockets:
            poll.register(each, events if each is wanted else select.POLLIN)
        poll.poll(POLL_S * 1000)

    def _check(self, what: str, rank: int, channel: int) -> None:
        if not (0 <= rank < self.nranks and rank != self.rank):
            raise ValueError(f"{what} must be another rank, 0..{self.nranks - 1} but {self.rank} (got {what}={rank})")
        if not 0 <= channel < MOST_CHANNELS:
            raise ValueError(f"channel must be in 0..2^32-1 (got {channel})")
