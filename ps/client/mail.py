"""What has come for a trainer from the others, and how much of its own is on its way to them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from common.errors import ProtocolError, StaleEpoch
from common.network.gradsync_pb2 import Parcel, ServerMessage, Taken, TrainerMessage
from ps.planes.parcels import HELD_BYTES, ROOM_BYTES, cost_of

__all__ = ["Mail"]

Channel = tuple[int, int]  # whose, and which


class Mail:
    """Thread-safe, by `changed`, which is notified of all that comes.

    Attributes:
        say: sends a message to the server.
        parcels: how many have come, by sender.
        on_the_way: bytes sent and not taken, by receiver.
    """

    def __init__(self, nranks: int, epoch: int, changed: threading.Condition) -> None:
        self._epoch, self._changed = epoch, changed
        self.say: Callable[[TrainerMessage], None] = lambda _: None
        self.parcels: Counter[int] = Counter()
        self.on_the_way: Counter[int] = Counter()
        self._whole: dict[Channel, deque[bytearray]] = {}  # messages that nobody has asked for yet
        self._sent: Counter[int] = Counter()  # parcels, by receiver
        self._begun: dict[Channel, bytearray] = {}  # what has come of the next one
        self._held = 0  # bytes of both
        self._untold: Counter[int] = Counter()  # bytes that were taken, by sender, of which it has not been told
        self._few = ROOM_BYTES // (2 * nranks)  # that need not be told: half of the room is always left
        self._asked = -1  # whose message the program waits for

    def take(self, message: ServerMessage, server: str) -> None:
        """
        Raises:
            ProtocolError: a parcel that cannot be meant.
        """
        with self._changed:
            if message.WhichOneof("kind") == "taken":
                self.on_the_way[message.taken.rank] -= message.taken.bytes
            else:
                self._add(message.parcel, server)
            self._changed.notify_all()

    def _add(self, parcel: Parcel, server: str) -> None:
        source, channel = parcel.rank, (parcel.rank, parcel.channel)
        if parcel.epoch != self._epoch:
            raise StaleEpoch(f"{server} passed on a parcel of epoch {parcel.epoch}, this is epoch {self._epoch}")
        if parcel.number != self.parcels[source]:
            raise ProtocolError(
                f"{server} passed on parcel {parcel.number} of rank {source}, expected {self.parcels[source]}"
            )
        begun = self._begun.setdefault(channel, bytearray())
        begun += parcel.data
        if len(begun) > parcel.size:
            raise ProtocolError(f"{server} sent {len(begun):,} bytes of a message of {parcel.size:,} of rank {source}")
        if len(begun) == parcel.size:
            self._whole.setdefault(channel, deque()).append(self._begun.pop(channel))
        self.parcels[source] += 1
        self._held += len(parcel.data)
        self._untold[source] += cost_of(parcel)
        self._tell()

    def has(self, source: int, channel: int) -> bool:
        """Whether a message is there."""
        return bool(self._whole.get((source, channel)))

    def pop(self, source: int, channel: int) -> bytearray:
        """The next one, which is there."""
        with self._changed:
            messages = self._whole[source, channel]
            message = messages.popleft()
            if not messages:
                del self._whole[source, channel]
            self._held -= len(message)
            self._tell()
            return message

    def ask(self, source: int) -> None:
        """The program waits for a message of this rank, whatever else there is; -1: it does not."""
        with self._changed:
            self._asked = source
            self._tell()

    def has_room(self, nbytes: int) -> bool:
        """Whether so much can be sent now."""
        return sum(self.on_the_way.values()) + nbytes <= ROOM_BYTES

    def send(self, parcel: Parcel) -> None:
        """There is room for it."""
        with self._changed:
            self.on_the_way[parcel.rank] += cost_of(parcel)
            parcel.number = self._sent[parcel.rank]
            self._sent[parcel.rank] += 1
        self.say(TrainerMessage(parcel=parcel))

    def _tell(self) -> None:
        """Let those know for whom there is room."""
        for source, nbytes in list(self._untold.items()):
            if nbytes > self._few and (self._held <= HELD_BYTES or source == self._asked):
                del self._untold[source]
                self.say(TrainerMessage(taken=Taken(epoch=self._epoch, rank=source, bytes=nbytes)))
