"""Which data plane a trainer has with each server: it offers its memory, and takes what the server answers."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import ProtocolError, UsageError
from common.network.gradsync_pb2 import Place, Plane, Register
from common.system.handover import Link
from common.system.memory import Unreachable
from common.tensors.arena import Arena, FloatArray
from ps.client.session import Session
from ps.client.shared_parameters import SharedParameters
from ps.planes.grpc_plane import GrpcTrainerPlane
from ps.planes.mailboxes import Mailboxes
from ps.planes.plane import TrainerPlane
from ps.planes.shared_memory import memory_of, place_of
from ps.planes.shm_trainer import SharedMemoryTrainerPlane, TrainerMemory
from ps.store.modes import SYNC, Mode

__all__ = ["DataPlanes"]


class DataPlanes:
    """Of one trainer.

    Args:
        asked: one of DATA_PLANES.
    """

    def __init__(self, asked: str, rank: int, nranks: int, mode: Mode) -> None:
        self._asked, self.rank, self._nranks, self._mode = asked, rank, nranks, mode
        self.memory = TrainerMemory()
        self._shared = SharedParameters(self.memory)
        self._links: dict[str, Link] = {}  # by session, to the servers of this host and user
        self._out_of_reach: dict[str, str] = {}  # why there is none
        self._results: FloatArray | None = None  # where servers write parameters, except in sync mode

    def offers(self, message: Register, sessions: Sequence[Session], arena: Arena) -> list[Register]:
        """The message to each server, which is handed this trainer's memory if that is within its reach."""
        if self._asked == "grpc":
            return [message for _ in sessions]
        parameters: FloatArray | None = arena.parameters
        if self._mode != SYNC:
            near = self.memory.reaches(arena.parameters)
            parameters = self._results = arena.parameters if near else self.memory.pool.empty(arena.parameters.size)
        elif not message.HasField("optimizer"):
            parameters = None
        return [self._offer(message, session, parameters) for session in sessions]

    def _offer(self, message: Register, session: Session, parameters: FloatArray | None) -> Register:
        mine = Register()
        mine.CopyFrom(message)
        try:
            link = self._links[session.name] = self.memory.others.visit(session.desk)
            link.give(self.memory.probe)
            place = Place() if parameters is None else place_of(parameters, self.memory.pool, link.give)
            if place.HasField("memory"):
                mine.parameters.CopyFrom(place)
            mine.probe.CopyFrom(memory_of(self.memory.probe))
        except Unreachable as exc:
            self._out_of_reach[session.name] = str(exc)
        return mine

    def settle(self, sessions: Sequence[Session], arena: Arena) -> None:
        """All servers have answered: make the plane of each session.

        Raises:
            UsageError: the plane is not the one that was asked for.
            ProtocolError: a server's answer makes no sense.
            Unreachable: a server's memory cannot be mapped.
        """
        near: list[tuple[Session, SharedMemoryTrainerPlane]] = []
        for session in sessions:
            terms = session.inbox.terms
            if terms.kind == SharedMemoryTrainerPlane.name:
                near.append((session, self._shared_memory(session, terms, arena)))
            else:
                session.use(self._grpc(session, terms))
        if near and all(session.inbox.terms.in_place for session, _ in near):
            self._share_parameters(near, arena, whole=len(near) == len(sessions))
        for session, plane in near:
            session.use(plane)

    def _grpc(self, session: Session, terms: Plane) -> TrainerPlane:
        if terms.kind != GrpcTrainerPlane.name:
            raise ProtocolError(f"{session.name} answered with data plane {terms.kind!r}")
        if self._asked == SharedMemoryTrainerPlane.name:
            why = self._out_of_reach.get(session.name) or terms.why_not
            raise UsageError(
                f"{session.name} and rank {self.rank} cannot share memory: {why}; use --data-plane auto or grpc"
            )
        return GrpcTrainerPlane(session)

    def _shared_memory(self, session: Session, terms: Plane, arena: Arena) -> SharedMemoryTrainerPlane:
        if session.name not in self._links:
            raise ProtocolError(f"{session.name} shares memory with a trainer that has offered none")
        shard, others = session.shard, self.memory.others
        parameters: FloatArray | None = None
        if self._mode == SYNC:
            parameters = others.array(terms.parameters, shard.length)
        elif self._results is not None and self._results is not arena.parameters:
            parameters = self._results[shard.start : shard.stop]
        mailboxes = Mailboxes(others.segment(terms.mailboxes), self._nranks)
        mine = mailboxes.to_server[self.rank], mailboxes.to_trainer[self.rank]
        return SharedMemoryTrainerPlane(session, shard, self.memory, self._links[session.name], mine, parameters)

    def _share_parameters(
        self, near: Sequence[tuple[Session, SharedMemoryTrainerPlane]], arena: Arena, *, whole: bool
    ) -> None:
        """Have one copy of the parameters for all, which then need not be copied; `whole`: all servers are near."""
        places = [(session.shard, session.inbox.terms.parameters) for session, _ in near]
        if (self.rank == 0 or whole) and self._shared.share(arena.parameters, self.rank, places):
            for _, plane in near:
                plane.parameters = None

    def hang_up(self) -> None:
        """In a forked child: its open connections would hide from the servers that the trainer died."""
        self.memory.hang_up()

    def part(self) -> None:
        """The parameters are this trainer's own again."""
        self._shared.part()

    def close(self) -> None:
        self.memory.close()
