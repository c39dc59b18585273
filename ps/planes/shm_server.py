"""The plane within a host, at the server's end: gradients are read where trainers have them, results where they are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from google.protobuf.message import DecodeError

from common.errors import PeerLost, ProtocolError
from common.network.gradsync_pb2 import Place, Plane, Register, Served, ServerMessage, TrainerMessage
from common.system.handover import Link
from common.system.memory import Segment, SegmentPool, Unreachable
from common.system.semaphore import Semaphore
from common.tensors.arena import FloatArray
from ps.planes.mailboxes import Mailboxes, mailboxes_bytes
from ps.planes.plane import ServerPlane
from ps.planes.send_queue import SendQueue
from ps.planes.shared_memory import Desk, memory_of, place_of
from ps.planes.wire_format import Outgoing
from ps.store.store import Result, Store

__all__ = ["ServerMemory", "SharedMemoryServerPlane"]


class ServerMemory:
    """What a server shares with those trainers that have handed in their memory at its desk.

    Args:
        pool: makes the arrays that they read.
    """

    def __init__(self, nranks: int, pool: SegmentPool) -> None:
        self.desk = Desk()
        self._pool, self._nranks = pool, nranks
        self._links: dict[int, Link] = {}
        self._in_rank_0: tuple[Segment, int] | None = None  # where in its memory the parameters are, in bytes
        self.parameters = Place()  # once handed out: the shard's, in sync mode
        self._average: Place | None = None

    @cached_property
    def mailboxes(self) -> Mailboxes:
        """For what is small and belongs to a step."""
        return Mailboxes(self._pool.create(mailboxes_bytes(self._nranks)), self._nranks, create=True)

    @property
    def in_use(self) -> bool:
        """Whether some trainer shares memory with this server."""
        return bool(self._links)

    @property
    def in_place(self) -> bool:
        """Whether the parameters are kept in rank 0's memory."""
        return self._in_rank_0 is not None

    def link_to(self, register: Register) -> Link:
        """
        Raises:
            Unreachable: the trainer has not handed in its memory.
        """
        self.desk.segment(register.probe)
        return self.desk.giver_of(register.probe)

    def admit(self, rank: int, link: Link) -> None:
        """A trainer gets what is handed out from now on."""
        self._links[rank] = link

    def keep_parameters(self, register: Register, store: Store) -> None:
        """Rank 0's memory becomes that of the shard's parameters.

        Raises:
            Unreachable: it was not handed in, or is not as large.
        """
        array = self.array(register.parameters, register.length)
        store.keep_parameters_in(array[store.shard.start : store.shard.stop])
        memory = self.desk.segment(register.parameters.memory)  # rank 0 may leave before others map it
        self._in_rank_0 = memory, register.parameters.offset + 4 * store.shard.start

    def array(self, place: Place, length: int) -> FloatArray:
        """So many words of a trainer's.

        Raises:
            Unreachable: they cannot be mapped.
        """
        return self.desk.array(place, length)

    def hand_out(self, parameters: FloatArray | None) -> None:
        """Let the trainers have the mailboxes' memory and, if they are to read them there, the parameters'. Nobody else
        comes."""
        self.desk.shut()
        if not self.in_use:
            return
        self._give(self.mailboxes.segment, 0)
        if parameters is None:
            return
        if self._in_rank_0 is None:
            self.parameters = self._place(parameters, 0)
        else:
            segment, offset = self._in_rank_0
            self._give(segment, 0)
            self.parameters = Place(memory=memory_of(segment), offset=offset)

    def average_at(self, array: FloatArray, step: int) -> Place:
        """Where the trainers find the averages, which are always at the same place; handed out at the first time."""
        if self._average is None:
            self._average = self._place(array, step)
        return self._average

    @property
    def bell(self) -> Semaphore:
        """Rung when there is a note of a trainer."""
        return self.mailboxes.bell

    def close(self) -> None:
        self.desk.close()

    def _place(self, array: FloatArray, step: int) -> Place:
        return place_of(array, self._pool, lambda segment: self._give(segment, step))

    def _give(self, segment: Segment, step: int) -> None:
        for rank, link in self._links.items():
            try:
                link.give(segment)
            except Unreachable as exc:
                raise PeerLost(f"rank {rank} has left at step {step}: {exc}") from exc


class SharedMemoryServerPlane(ServerPlane):
    """
    Args:
        queue: of the messages that go over gRPC.
        landing: the trainer's memory, where the shard's parameters are written; None: it reads them by itself.
    """

    name = "shm"

    def __init__(
        self,
        rank: int,
        queue: SendQueue[ServerMessage | Outgoing],
        epoch: int,
        memory: ServerMemory,
        landing: FloatArray | None,
    ) -> None:
        self._queue, self._epoch, self._memory, self._landing = queue, epoch, memory, landing
        self._rank = rank
        self._from_trainer, self._to_trainer = memory.mailboxes.to_server[rank], memory.mailboxes.to_trainer[rank]
        self._open = False  # whether the trainer knows of the mailboxes

    def terms(self) -> Plane:
        mailboxes, parameters = memory_of(self._memory.mailboxes.segment), self._memory.parameters
        return Plane(kind=self.name, mailboxes=mailboxes, parameters=parameters, in_place=self._memory.in_place)

    def gradients(self, place: Place, length: int) -> FloatArray:
        return self._memory.array(place, length)

    def deliver(self, result: Result) -> None:
        if self._landing is not None:
            self._landing[...] = result.words
        if not result.complete:
            return
        served = Served(epoch=self._epoch, step=result.step)
        if result.averages:
            served.gradients.CopyFrom(self._memory.average_at(result.words, result.step))
        message = ServerMessage(served=served)
        if not self._open or not self._to_trainer.put(message.SerializeToString()):
            self._queue.put([message])

    def open(self) -> None:
        self._open = True

    def notes(self) -> Iterator[TrainerMessage]:
        while self._open and (note := self._from_trainer.take()) is not None:
            try:
                yield TrainerMessage.FromString(note)
            except DecodeError as exc:
                raise ProtocolError(f"rank {self._rank} left a note that cannot be decoded") from exc
