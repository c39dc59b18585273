"""Which data plane a server has with each trainer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

from common.network.gradsync_pb2 import Place, Register, ServerMessage, TrainerMessage
from common.network.sockets import keep_little, on_loopback
from common.system.memory import SegmentPool, Unreachable
from common.tensors.arena import FloatArray
from ps.coordinator.liveness import ServerQueue
from ps.planes.data_connection import DataConnection
from ps.planes.data_port import Seats
from ps.planes.even_pace import NEAR_AHEAD_BYTES, EvenPace
from ps.planes.grpc_plane import GrpcServerPlane
from ps.planes.plane import ServerPlane
from ps.planes.shm_server import ServerMemory, SharedMemoryServerPlane
from ps.planes.tcp_plane import FromTrainer, TcpServerPlane
from ps.store.modes import SYNC, Mode
from ps.store.store import Result, Store

__all__ = ["DataPlanes"]

LISTEN_S = 0.1  # who listens looks this often whether the training is over


class DataPlanes:
    """
    Args:
        pool: makes the arrays that trainers of this host and user read; without one none does.
        port: where trainers open data connections; without one none does.
        hear: is called with what comes over them: the rank, its message, and the words of its chunk.
        ended: is called when one has ended: the rank, and the error if there was one.
    """

    def __init__(
        self,
        nranks: int,
        epoch: int,
        pool: SegmentPool | None,
        port: Seats | None,
        hear: Callable[[int, TrainerMessage, FloatArray | None], None],
        ended: Callable[[int, Exception | None], None],
    ) -> None:
        self._epoch, self._port, self._hear, self._ended = epoch, port, hear, ended
        self._memory = ServerMemory(nranks, pool) if pool else None
        self._of: dict[int, ServerPlane] = {}
        self._queues: dict[int, ServerQueue] = {}
        self._connections: list[DataConnection] = []
        self._pace = EvenPace()

    @property
    def desk(self) -> str:
        """Where trainers of this host and user hand in their memory; "": nowhere."""
        return self._memory.desk.name if self._memory else ""

    @property
    def data_port(self) -> int:
        """Where trainers open data connections; 0: nowhere."""
        return self._port.port if self._port else 0

    @property
    def near(self) -> bool:
        """Whether data connections are all within this host."""
        return self._port is not None and self._port.near

    def choose(self, rank: int, register: Register, mode: Mode, store: Store, queue: ServerQueue) -> None:
        """A trainer has registered: memory if it reaches ours, and we its, else its data connection, else gRPC."""
        self._queues[rank] = queue
        opened = self._port.take(rank) if self._port and register.connected else None
        if opened:
            self._of[rank] = self._tcp(rank, opened, mode, store)
            return
        if not register.HasField("probe"):
            why = "the trainer does not offer its memory"
        elif self._memory is None:
            why = "the server does not offer its memory"
        else:
            try:
                self._of[rank] = self._shared_memory(rank, register, mode, store, self._memory, queue)
                return
            except Unreachable as exc:
                why = str(exc)
        self._of[rank] = GrpcServerPlane(queue, self._epoch, why_not=why)

    def _tcp(self, rank: int, opened: socket.socket, mode: Mode, store: Store) -> ServerPlane:
        pace = self._pace if mode == SYNC else None
        if pace:
            near = on_loopback(opened)
            pace.seat(rank, NEAR_AHEAD_BYTES if near else None)
            if not near:
                keep_little(opened)
        connection = DataConnection(opened, peer=f"rank {rank}")
        self._connections.append(connection)
        connection.begin(
            FromTrainer(
                rank,
                store.shard,
                partial(self._hear, rank),
                partial(self._ended, rank),
                pace=pace,
                wake=connection.wake,
            )
        )
        return TcpServerPlane(connection, self._epoch)

    def _shared_memory(
        self, rank: int, register: Register, mode: Mode, store: Store, memory: ServerMemory, queue: ServerQueue
    ) -> ServerPlane:
        link = memory.link_to(register)
        landing: FloatArray | None = None
        if mode != SYNC:
            whole = memory.array(register.parameters, register.length)
            landing = whole[store.shard.start : store.shard.stop]
        elif rank == 0 and register.HasField("parameters"):
            memory.keep_parameters(register, store)
        memory.admit(rank, link)
        return SharedMemoryServerPlane(rank, queue, self._epoch, memory, landing)

    def settle(self, mode: Mode, store: Store) -> None:
        """All have registered: tell each how its data travel."""
        if self._memory:
            self._memory.hand_out(store.parameters if mode == SYNC else None)
        for rank, plane in self._of.items():
            self._queues[rank].put([ServerMessage(plane=plane.terms())])

    def deliver(self, result: Result) -> None:
        """Hand out a result to those who wait for it."""
        for rank in result.ranks:
            self._of[rank].deliver(result)

    def gradients(self, rank: int, place: Place, length: int) -> FloatArray:
        """A trainer's, of the whole arena, where it has them.

        Raises:
            Unreachable: they cannot be read.
        """
        if rank not in self._of:
            raise Unreachable("it has not registered")
        return self._of[rank].gradients(place, length)

    def name(self, rank: int) -> str:
        """Of a trainer's plane; "": it has none yet."""
        return self._of[rank].name if rank in self._of else ""

    def sent(self, rank: int) -> int:
        """Bytes of results that were sent to a trainer."""
        return self._of[rank].sent if rank in self._of else 0

    def notes(self, rank: int) -> Iterator[TrainerMessage]:
        """What a trainer has said otherwise than over gRPC."""
        return self._of[rank].notes() if rank in self._of else iter(())

    def listen(self, hear: Callable[[], None], over: Callable[[], bool]) -> None:
        """From now on `hear` is called on a thread of its own when there may be notes, until `over` holds."""
        for plane in self._of.values():
            plane.open()
        if self._memory and self._memory.in_use:
            threading.Thread(
                target=self._listen, args=(self._memory, hear, over), name="gradsync-mailboxes", daemon=True
            ).start()

    @staticmethod
    def _listen(memory: ServerMemory, hear: Callable[[], None], over: Callable[[], bool]) -> None:
        """One thread hears all mailboxes; it sleeps until somebody rings."""
        while not over():
            if memory.bell.sleep(LISTEN_S):
                hear()

    def wake(self) -> None:
        """Have the thread look whether the training is over."""
        if self._memory and self._memory.in_use:
            self._memory.bell.post()

    def close(self, until: float = 0.0) -> None:
        """
        Args:
            until: results are still sent, until then at most; monotonic, in seconds.
        """
        if self._port:
            self._port.close()
        for connection in self._connections:
            connection.close(until)
        if self._memory:
            self._memory.close()
        self._memory = None
        for held in (self._of, self._queues, self._connections):
            held.clear()
