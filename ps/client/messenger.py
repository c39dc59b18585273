"""Messages from trainer to trainer, which the first server passes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.network.gradsync_pb2 import Awaiting, TrainerMessage
from common.sync.messenger import Messenger
from ps.client.servers import Servers
from ps.planes.parcels import cost_of, parcels_of

__all__ = ["ServerMessenger"]

SOON_S = 0.1  # who has waited for so long tells the server, which then looks after whom it waits for
MOST_CHANNELS = 1 << 32


class ServerMessenger(Messenger):
    """
    Args:
        check: raises where the messenger cannot be used.
    """

    def __init__(self, servers: Servers, rank: int, nranks: int, epoch: int, check: Callable[[], None]) -> None:
        self._servers, self._mail, self._epoch, self._check = servers, servers.mail, epoch, check
        self.rank, self.nranks = rank, nranks

    def send(self, to: int, channel: int, data: bytes | bytearray | memoryview) -> None:
        self._check_call("to", to, channel)
        self._servers.check()
        view = memoryview(data)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        for parcel in parcels_of(flat, epoch=self._epoch, rank=to, channel=channel):
            self._wait_for_room(cost_of(parcel))
            self._mail.send(parcel)

    def receive(self, source: int, channel: int) -> bytearray:
        self._check_call("source", source, channel)
        mail = self._mail
        if not mail.has(source, channel):
            with self._asking(source):
                self._wait(lambda: mail.has(source, channel), lambda: source, f"waiting for a message of rank {source}")
        return mail.pop(source, channel)

    def comes(self, source: int, channel: int, seconds: float) -> bool:
        self._check_call("source", source, channel)
        with self._asking(source):
            return self._servers.soon(lambda: self._mail.has(source, channel), seconds)

    def _wait_for_room(self, nbytes: int) -> None:
        mail = self._mail

        def fullest() -> int:
            return max(range(self.nranks), key=lambda rank: mail.on_the_way[rank])

        if not mail.has_room(nbytes):
            self._wait(lambda: mail.has_room(nbytes), fullest, "waiting for other ranks to take messages", room=True)

    def _wait(self, done: Callable[[], bool], whom: Callable[[], int], doing: str, *, room: bool = False) -> None:
        """Until `done` holds; the server learns for whom, and anew when something else has come of that rank."""
        if self._servers.soon(done, SOON_S):
            return
        first, mail = self._servers.sessions[0], self._mail
        while not done():
            rank = whom()
            parcels = mail.parcels[rank]
            mail.say(self._awaiting(rank, parcels=parcels, room=room))
            self._servers.wait(
                lambda session: session is not first or done() or mail.parcels[rank] != parcels,  # noqa: B023 - at once
                doing,
            )
        mail.say(self._awaiting(whom(), over=True))

    @contextmanager
    def _asking(self, source: int) -> Iterator[None]:
        self._mail.ask(source)
        try:
            yield
        finally:
            self._mail.ask(-1)

    def _awaiting(self, rank: int, *, parcels: int = 0, room: bool = False, over: bool = False) -> TrainerMessage:
        return TrainerMessage(awaiting=Awaiting(epoch=self._epoch, rank=rank, parcels=parcels, room=room, over=over))

    def _check_call(self, name: str, other: int, channel: int) -> None:
        self._check()
        if not 0 <= other < self.nranks or other == self.rank:
            raise ValueError(f"there is no such other rank in 0..{self.nranks - 1} (got {name}={other})")
        if not 0 <= channel < MOST_CHANNELS:
            raise ValueError(f"channel must be in 0..{MOST_CHANNELS - 1} (got {channel})")
