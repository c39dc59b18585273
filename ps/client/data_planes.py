"""Which data plane a trainer has with each server: it offers its memory or, where that is out of reach, a data
connection, and takes what the server answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.errors import PeerUnreachable, ProtocolError, UsageError
from common.network.gradsync_pb2 import Place, Plane, Register
from common.system.handover import Link
from common.system.memory import Unreachable
from common.tensors.arena import Arena, FloatArray
from ps.client.from_server import FromServer
from ps.client.session import Session
from ps.client.shared_parameters import SharedParameters
from ps.planes.data_connection import DataConnection
from ps.planes.data_port import HANDSHAKE_S, call
from ps.planes.grpc_plane import GrpcTrainerPlane
from ps.planes.mailboxes import Mailboxes
from ps.planes.plane import TrainerPlane
from ps.planes.shared_memory import memory_of, place_of
from ps.planes.shm_trainer import SharedMemoryTrainerPlane, TrainerMemory
from ps.planes.tcp_plane import TcpTrainerPlane
from ps.store.modes import SYNC, Mode

__all__ = ["DataPlanes"]


class DataPlanes:
    """Of one trainer.

    Args:
        asked: one of DATA_PLANES.
        timeout: how long a server may take to let a data connection in, in seconds, if that is less than HANDSHAKE_S.
    """

    def __init__(self, asked: str, rank: int, nranks: int, mode: Mode, timeout: float) -> None:
        self._asked, self.rank, self._nranks, self._mode = asked, rank, nranks, mode
        self._patience = min(timeout, HANDSHAKE_S)
        self.memory = TrainerMemory()
        self._shared = SharedParameters(self.memory)
        self._links: dict[str, Link] = {}  # by session, to the servers of this host and user
        self._out_of_reach: dict[str, str] = {}  # why there is none
        self._connections: dict[str, DataConnection] = {}  # by session
        self._results: FloatArray | None = None  # where servers write parameters, except in sync mode

    def offers(self, message: Register, sessions: Sequence[Session], arena: Arena) -> list[Register]:
        """The message to each server, which is handed this trainer's memory if that is within its reach.

        Raises:
            PeerUnreachable: a data connection is asked for, and cannot be had.
        """
        if self._asked == "grpc":
            return [message for _ in sessions]
        if self._asked == TcpTrainerPlane.name:
            return [self._connect(message, session) for session in sessions]
        parameters: FloatArray | None = arena.parameters
        if self._mode != SYNC:
            near = self.memory.reaches(arena.parameters)
            parameters = self._results = arena.parameters if near else self.memory.pool.empty(arena.parameters.size)
        elif not message.HasField("optimizer"):
            parameters = None
        offered = [self._offer(message, session, parameters) for session in sessions]
        if self._asked != "auto":
            return offered
        pairs = zip(offered, sessions, strict=True)
        return [mine if mine.HasField("probe") else self._connect(mine, session) for mine, session in pairs]

    def _offer(self, message: Register, session: Session, parameters: FloatArray | None) -> Register:
        mine = Register()
        mine.CopyFrom(message)
        try:
            link = self._links[session.name] = self.memory.others.visit(session.joined.desk)
            link.give(self.memory.probe)
            place = Place() if parameters is None else place_of(parameters, self.memory.pool, link.give)
            if place.HasField("memory"):
                mine.parameters.CopyFrom(place)
            mine.probe.CopyFrom(memory_of(self.memory.probe))
        except Unreachable as exc:
            self._out_of_reach[session.name] = str(exc)
        return mine

    def _connect(self, message: Register, session: Session) -> Register:
        """Open a data connection, of which the server is told; without one, unless it is asked for, gRPC is left."""
        server, mine = session.joined, Register()
        mine.CopyFrom(message)
        try:
            if not server.data_port:
                raise PeerUnreachable("it has no data port")
            where, limit = (server.host, server.data_port), self._patience
            opened = call(*where, self.rank, server.token, limit, seat=server.seat, server=session.name)
        except PeerUnreachable as exc:
            if self._asked != "auto":
                raise PeerUnreachable(
                    f"rank {self.rank} cannot exchange data with {session.name} over TCP: {exc}; open that port, which "
                    "the server's --data-port fixes, or use --data-plane auto or grpc"
                ) from exc
            if server.data_port:
                print(
                    f"gradsync: rank {self.rank} and {session.name} exchange data over gRPC, which is slower: {exc}",
                    file=sys.stderr,
                    flush=True,
                )
            return mine
        connection = self._connections[session.name] = DataConnection(opened, peer=session.name)
        connection.begin(FromServer(session.inbox))
        mine.connected = True
        return mine

    def has_answered(self, session: Session) -> bool:
        """Whether the first parameters have come and, where they may have overtaken it, word of the plane."""
        told = session.name not in self._connections or session.inbox.terms.kind
        return session.inbox.version >= 0 and bool(told)

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
            elif terms.kind == TcpTrainerPlane.name:
                session.use(self._tcp(session))
            else:
                session.use(self._grpc(session, terms))
        if near and all(session.inbox.terms.in_place for session, _ in near):
            self._share_parameters(near, arena, whole=len(near) == len(sessions))
        for session, plane in near:
            session.use(plane)

    def _tcp(self, session: Session) -> TrainerPlane:
        if session.name not in self._connections:
            raise ProtocolError(f"{session.name} answered with a data connection that was not opened")
        return TcpTrainerPlane(self._connections[session.name])

    def _grpc(self, session: Session, terms: Plane) -> TrainerPlane:
        if terms.kind != GrpcTrainerPlane.name:
            raise ProtocolError(f"{session.name} answered with data plane {terms.kind!r}")
        if self._asked == SharedMemoryTrainerPlane.name:
            why = self._out_of_reach.get(session.name) or terms.why_not
            raise UsageError(
                f"{session.name} and rank {self.rank} cannot share memory: {why}; use --data-plane auto, tcp or grpc"
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
        for connection in self._connections.values():
            connection.hang_up()

    def part(self) -> None:
        """The parameters are this trainer's own again."""
        self._shared.part()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._results = None
        self.memory.close()
