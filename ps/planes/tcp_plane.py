"""The plane over TCP: gradients and results travel in frames of a data connection, from the arena and into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from common.errors import ProtocolError
from common.network.gradsync_pb2 import Chunk, Place, Plane, Served, ServerMessage, TrainerMessage
from common.network.rpc import CHUNK_BYTES
from common.sync.trace import Trace
from common.system.memory import Unreachable, aligned_empty
from common.tensors.arena import FloatArray
from ps.planes.data_connection import NEAR_BYTES, DataConnection
from ps.planes.even_pace import EvenPace
from ps.planes.plane import ServerPlane, TrainerPlane
from ps.planes.wire_format import Outgoing, frames, told_by
from ps.store.shards import Shard
from ps.store.store import Result

__all__ = ["MESSAGE_BYTES", "FromTrainer", "TcpServerPlane", "TcpTrainerPlane", "bytes_for"]

MESSAGE_BYTES = 4 * CHUNK_BYTES  # of a message without words, at most, as over gRPC
AT_ONCE = 128 * 1024  # bytes; no more are sent by whoever has them ready, rather than by the connection's thread


def bytes_for(nbytes: int, peer: str) -> memoryview:
    """Where a message without words is to be written.

    Raises:
        ProtocolError: it is too long.
    """
    if nbytes > MESSAGE_BYTES:
        raise ProtocolError(f"{peer} announced a message of {nbytes:,} bytes, more than {MESSAGE_BYTES:,}")
    return memoryview(bytearray(nbytes))


class TcpTrainerPlane(TrainerPlane):
    """Results are received into the arena, except while they are held back."""

    name = "tcp"
    can_hold = True

    def __init__(self, connection: DataConnection) -> None:
        self._connection = connection
        self._gradients: FloatArray = np.empty(0, np.float32)

    def gradients_in(self, array: FloatArray) -> None:
        self._gradients = array

    def push(self, words: Chunk, trace: Trace) -> None:
        array = self._gradients[words.start : words.start + words.size]
        label = {"epoch": words.epoch, "step": words.step, "bucket": words.bucket}
        messages = frames(TrainerMessage, "gradients", array, first=words.start, most=self._connection.most, **label)
        self._connection.put(trace.sending(messages, words.bucket), at_once=array.nbytes <= AT_ONCE)

    def note(self, message: TrainerMessage) -> None:
        self._connection.put([message], at_once=True)

    def say(self, messages: Iterable[TrainerMessage | Outgoing]) -> None:
        self._connection.put(messages)

    def welcome(self) -> None:
        self._connection.wake()

    def fetch(self, out: FloatArray, served: Served, *, averages: bool) -> None:
        """Everything is there."""


class TcpServerPlane(ServerPlane):
    """Over a connection that the trainer has opened."""

    name = "tcp"

    def __init__(self, connection: DataConnection, epoch: int) -> None:
        self.connection, self._epoch = connection, epoch

    def terms(self) -> Plane:
        return Plane(kind=self.name)

    def gradients(self, place: Place, length: int) -> FloatArray:  # noqa: ARG002 - nowhere
        raise Unreachable("they travel over TCP")

    def deliver(self, result: Result) -> None:
        """Lasting words are read when they are sent; others are copied at once."""
        words = result.words if result.lasting else result.words.copy()
        self.sent += words.nbytes
        label = {"epoch": self._epoch, "step": result.step}
        messages: list[Outgoing | ServerMessage] = []
        messages += frames(ServerMessage, "parameters", words, first=result.start, most=self.connection.most, **label)
        if result.complete:
            messages.append(ServerMessage(served=Served(epoch=self._epoch, step=result.step)))
        self.connection.put(messages, at_once=words.nbytes <= AT_ONCE)


class FromTrainer:
    """What a server does with that which comes from a trainer; a Receiver.

    Args:
        pace: keeps trainers together, if it is wanted; it has a seat there.
        wake: is to be called when it is read from again.
        hear: is called with every message, and the words of its chunk.
        ended: nothing more comes; with the error, if there was one.
    """

    def __init__(
        self,
        rank: int,
        shard: Shard,
        hear: Callable[[TrainerMessage, FloatArray | None], None],
        ended: Callable[[Exception | None], None],
        *,
        pace: EvenPace | None,
        wake: Callable[[], None],
    ) -> None:
        self._name, self._shard, self._hear, self.ended = f"rank {rank}", shard, hear, ended
        self._rank, self._pace, self._wake = rank, pace, wake
        self._words: FloatArray | None = None  # of the message
        self._message: TrainerMessage | None = None
        self._bytes = memoryview(b"")  # of a message without words

    def place(self, tag: bytes, nbytes: int) -> memoryview | None:
        found = told_by(TrainerMessage, tag)
        if found is None:
            self._bytes = bytes_for(nbytes, self._name)
            return self._bytes
        self._message, chunk = found
        start, size = chunk.start, nbytes // 4
        fits = self._shard.start <= start and start + size <= self._shard.stop
        if nbytes % 4 or not 0 < nbytes <= NEAR_BYTES or not fits:
            raise ProtocolError(f"{self._name} announced {nbytes:,} bytes of words from {start} on, of {self._shard}")
        if self._pace and not self._pace.may_send(self._rank, self._wake):
            return None
        self._words = aligned_empty(size)
        return memoryview(self._words.view(np.uint8).data)

    def take(self) -> None:
        message, words, self._message, self._words = self._message, self._words, None, None
        if self._pace and words is not None:
            self._pace.has_sent(self._rank, words.nbytes)
        self._hear(message or TrainerMessage.FromString(self._bytes.tobytes()), words)
