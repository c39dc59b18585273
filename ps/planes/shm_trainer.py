"""The plane within a host, at the trainer's end: the server reads gradients where they lie, and results are copied from
its memory, unless the arena's parameters are that memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from common.errors import ProtocolError
from common.network.gradsync_pb2 import Chunk, Served, ServerMessage, TrainerMessage
from common.sync.trace import Trace
from common.system.handover import Link
from common.system.memory import Segment, SegmentPool
from common.tensors.arena import FloatArray
from common.tensors.copying import copy
from ps.planes.mailboxes import Mailbox
from ps.planes.plane import Stream, TrainerPlane
from ps.planes.shared_memory import OthersMemory, place_of
from ps.planes.wire_format import Outgoing
from ps.store.shards import Shard

__all__ = ["SharedMemoryTrainerPlane", "TrainerMemory"]

PROBE_BYTES = 64


class TrainerMemory:
    """A trainer's own memory that servers of its host reach, and theirs that it reaches."""

    def __init__(self) -> None:
        self.pool, self.others = SegmentPool(), OthersMemory()
        self._probe: Segment | None = None
        self._copy: FloatArray | None = None

    @property
    def probe(self) -> Segment:
        """A piece of memory, to find out whether a server reaches it."""
        self._probe = self._probe or self.pool.create(PROBE_BYTES)
        return self._probe

    def empty(self, count: int, dtype: npt.DTypeLike) -> FloatArray:
        return self.pool.empty(count, dtype)

    def reaches(self, array: FloatArray) -> bool:
        """Whether servers can be handed the memory of this array."""
        return not array.size or self.pool.locate(array) is not None

    def copy_of(self, array: FloatArray) -> FloatArray:
        """For gradients that are out of reach: one for all servers, of the array's size, to be filled."""
        if self._copy is None or self._copy.size != array.size:
            self._copy = self.pool.empty(array.size)
        return self._copy

    def hang_up(self) -> None:
        """Close connections; what was handed over stays."""
        self.others.hang_up()

    def close(self) -> None:
        """Arrays that are still used keep their memory, and nothing else does."""
        self.others.close()
        self.pool.close()
        self.pool, self._probe, self._copy = SegmentPool(), None, None


class SharedMemoryTrainerPlane(TrainerPlane):
    """
    Args:
        link: by which the server is handed memory.
        mailboxes: to the server and from it.
        parameters: the shard's, where they are to be copied from; None: they are in the arena.
    """

    name = "shm"
    tells_results = True

    def __init__(
        self,
        stream: Stream,
        shard: Shard,
        memory: TrainerMemory,
        link: Link,
        mailboxes: tuple[Mailbox, Mailbox],
        parameters: FloatArray | None,
    ) -> None:
        self._stream, self._shard, self._memory, self._link = stream, shard, memory, link
        self.to_server, self.to_trainer = mailboxes
        self.parameters = parameters
        self._gradients: FloatArray = np.empty(0, np.float32)
        self._copy: FloatArray | None = None  # of them, if the server does not reach them

    def gradients_in(self, array: FloatArray) -> None:
        self._gradients = array
        self._copy = None if self._memory.reaches(array) else self._memory.copy_of(array)
        reached = array if self._copy is None else self._copy
        self.note(TrainerMessage(gradients_at=place_of(reached, self._memory.pool, self._link.give)))

    def push(self, words: Chunk, trace: Trace) -> None:
        if self._copy is not None:
            run = slice(words.start, words.start + words.size)
            copy(self._copy[run], self._gradients[run])
        trace.moment("sent", words.bucket)
        self.note(TrainerMessage(gradients=words))

    def note(self, message: TrainerMessage) -> None:
        """Through shared memory if there it cannot overtake what went over gRPC: of that the server has heard once it
        answers, for a trainer that awaits an answer says nothing else."""
        if self._stream.unanswered or not self.to_server.put(message.SerializeToString()):
            self._stream.post([message])

    def say(self, messages: Iterable[TrainerMessage | Outgoing]) -> None:
        self._stream.post(messages)

    def hear(self, seconds: float) -> ServerMessage | None:
        note = self.to_trainer.wait(seconds)
        try:
            return None if note is None else ServerMessage.FromString(note)
        except DecodeError as exc:
            raise ProtocolError("a server left a note that cannot be decoded") from exc

    def fetch(self, out: FloatArray, served: Served, *, averages: bool) -> None:
        source = self._memory.others.array(served.gradients, self._shard.length) if averages else self.parameters
        if source is not None:
            copy(out[self._shard.start : self._shard.stop], source)
