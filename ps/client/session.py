"""A trainer's side of the parameter server: one session with each server, pushed to and heard from in parallel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from common import __version__
from common.errors import GradSyncError, PeerStalled, ProtocolError, UsageError, choose, error_from_name
from common.launch.settings import check_rank
from common.network import rpc
from common.network.gradsync_pb2 import (
    Chunk,
    Commit,
    Configure,
    Goodbye,
    Hello,
    JoinReply,
    JoinRequest,
    Place,
    Plane,
    Pull,
    Register,
    ServerMessage,
    StatePiece,
    StateRequest,
    TraceReply,
    TraceRequest,
    TrainerMessage,
)
from common.network.rendezvous import GRACE, job_secret, proof_of
from common.sync.trace import NO_TRACE, ServerAnswer, Trace
from common.system.handover import Link
from common.system.memory import Segment, SegmentPool, Unreachable
from common.system.process import forget_in_children
from common.tensors.arena import Arena, FloatArray
from common.tensors.buckets import Bucket
from common.tensors.optimizers import Optimizer
from common.tensors.parts import Accumulator, is_number, parts_of, slot_of_key
from ps.client.outbox import Outbox
from ps.coordinator.servicer import JOIN, SESSION, TRACE
from ps.planes.frames import Outgoing, frames, read_server, to_bytes
from ps.planes.lanes import Lane, Lanes
from ps.planes.shared_memory import OthersMemory, memory_of, place_of
from ps.planes.wire import data_of, describe, optimizer_message, pieces, state_of, state_pieces
from ps.store.modes import SYNC, Mode
from ps.store.shards import Shard, plan_shards, shard_of_bucket

__all__ = ["DATA_PLANES", "Client"]

DATA_PLANES = ("auto", "shm", "grpc")
PROBE_BYTES = 64
FAREWELL_S = 2.0  # how long a leaving trainer waits for a server to take note
SLICE_S = 0.05  # a trainer that waits for a note looks this often whether somebody died


class Session:
    """The stream between this trainer and one server. What arrives is noted here, and `changed` is notified."""

    def __init__(self, name: str, channel: grpc.Channel, desk: str, changed: threading.Condition) -> None:
        self.name, self.desk = name, desk
        self.link: Link | None = None  # by which memory is handed over, if both are of one host and user
        self.out_of_reach = ""  # why there is none
        self.heard_at = time.monotonic()
        self.version = -1  # how many steps the parameters that have wholly arrived are old
        self.gathered: dict[int, bytearray] = {}  # by sequence number
        self.state: list[StatePiece] = []  # what has arrived of the optimizer state asked for
        self._gathering = bytearray()  # what has arrived of the next one
        self.error: GradSyncError | None = None
        self.shard = Shard(0, 0)
        self.served: FloatArray = np.empty(0, np.float32)  # what is served next is written to; the whole arena's
        self.plane = Plane(refusal="not asked")  # how data travel; known when the first parameters have arrived
        self.parameters: FloatArray | None = None  # of the shard, in the server's memory, if they are to be copied
        self.average_at = Place()  # where the server has the average of the step that has ended, if it did so
        self._changed = changed
        self._trace_of = channel.unary_stream(
            TRACE, request_serializer=TraceRequest.SerializeToString, response_deserializer=TraceReply.FromString
        )
        self.outbox: Outbox[TrainerMessage | Outgoing] = Outbox()
        self._leaving = False
        self.welcome = threading.Event()  # until then what is served is not taken; set but for a step committed ahead
        self.welcome.set()
        self.lanes: tuple[Lane, Lane] | None = None  # to the server and from it, if they share memory
        self._unanswered = True  # something went over gRPC, and nothing has come back since
        self._call: Any = channel.stream_stream(
            SESSION,
            request_serializer=to_bytes,
            response_deserializer=read_server,
        )(iter(self.outbox))
        self._listener = threading.Thread(target=self._listen, name="gradsync-listener", daemon=True)
        self._listener.start()

    def send(self, messages: Iterable[TrainerMessage | Outgoing]) -> None:
        """Queue messages for gRPC, as Outbox.put."""
        self._unanswered = True
        self.outbox.put(messages)

    def ask(self, *, events: bool, timeout: float) -> ServerAnswer:
        """What the server has to say for a trace."""
        before = time.monotonic_ns()
        try:
            replies = self._trace_of(TraceRequest(events=events), timeout=timeout)
            first = next(replies)
            after = time.monotonic_ns()
            data = b"".join(reply.data for reply in replies)
        except grpc.RpcError as exc:
            raise rpc.translate(exc, self.name, "telling what it has recorded") from exc
        return ServerAnswer(before, first.clock, after, first.host, data)

    def note(self, message: TrainerMessage) -> None:
        """Send a small message, through shared memory if there it cannot overtake what was sent before: of that the
        server has heard once it answers, for a trainer that awaits an answer says nothing else."""
        if self.lanes is None or self._unanswered or not self.lanes[0].put(message.SerializeToString()):
            self.send([message])

    def hear(self, seconds: float) -> None:
        """Wait at most so long for the server's next note."""
        if self.lanes and (note := self.lanes[1].wait(seconds)) is not None:
            self._handle(ServerMessage.FromString(note), None)

    def close(self, goodbye: TrainerMessage) -> None:
        self._leaving = True
        self.welcome.set()
        self.outbox.put([goodbye])
        self.outbox.end()
        self._listener.join(FAREWELL_S)
        self._call.cancel()
        self._listener.join()

    def _listen(self) -> None:
        try:
            for frame in self._call:
                self._handle(frame.message, frame.words)
            self._note_error(ProtocolError(f"{self.name} ended the session without a reason"))
        except grpc.RpcError as exc:
            self._note_error(rpc.translate(exc, self.name, "training"))
        except GradSyncError as exc:
            self._note_error(exc)
            self._call.cancel()

    def _handle(self, message: ServerMessage, words: FloatArray | None) -> None:
        self.heard_at = time.monotonic()
        kind = message.WhichOneof("kind")
        if kind is None:  # a sign of life, which answers nothing
            return
        self._unanswered = False
        if kind == "parameters":
            self._store(message.parameters, data_of(message.parameters) if words is None else words)
            return
        with self._changed:
            if kind == "served":
                self.version, self.average_at = message.served.step, message.served.gradients
            elif kind == "plane":
                if self.link is None and not message.plane.refusal:
                    raise ProtocolError(f"{self.name} shares memory with a trainer that has offered none")
                self.plane = message.plane
            elif kind == "gathered":
                self._gathering += message.gathered.data
                if len(self._gathering) == message.gathered.size:
                    self.gathered[message.gathered.sequence] = self._gathering
                    self._gathering = bytearray()
            elif kind == "state":
                self.state.append(message.state)
            elif kind == "failure":
                self.error = self.error or error_from_name(message.failure.kind, message.failure.message)
            self._changed.notify_all()

    def _store(self, chunk: Chunk, data: FloatArray) -> None:
        if not self.shard.start <= chunk.start <= chunk.start + data.size <= self.shard.stop:
            raise ProtocolError(
                f"{self.name} sent elements {chunk.start}..{chunk.start + data.size} outside {self.shard}"
            )
        if chunk.step != self.version + 1:
            raise ProtocolError(f"{self.name} sent parameters of step {chunk.step}, expected {self.version + 1}")
        self.welcome.wait()  # for the commit, or for the end of the session
        if self._leaving:
            return
        self.served[chunk.start : chunk.start + data.size] = data

    def _note_error(self, error: GradSyncError) -> None:
        with self._changed:
            if not self._leaving:
                self.error = self.error or error
            self._changed.notify_all()


class Client:
    """One trainer's membership in a group of `nranks` trainers and `servers`; a context manager.

    Every blocking method waits at most `timeout` seconds for the other processes. A forked child has no part in it.

    Args:
        data_plane: how gradients and parameters travel: "shm", read and written where they lie, by processes of one
            host; "grpc", in messages; "auto": shm with each server that can reach this process's memory.

    Raises:
        PeerUnreachable, RendezvousError, VersionMismatch, UsageError: the group did not come together.
    """

    def __init__(
        self,
        servers: Sequence[str],
        rank: int,
        nranks: int,
        *,
        timeout: float = 30.0,
        data_plane: str = "auto",
        mode: Mode = SYNC,
    ) -> None:
        check_rank(rank, nranks)
        self._asked_plane = choose("data plane", data_plane, DATA_PLANES)
        self.rank, self.nranks, self.timeout, self.epoch, self.mode = rank, nranks, timeout, 0, mode
        self._pool, self._others_memory = SegmentPool(), OthersMemory()
        self._probe = self._pool.create(PROBE_BYTES)
        self._common: tuple[Segment, int] | None = None  # the parameters of all trainers, and where they are mapped
        self._told_of_gradients = False
        self._staging: FloatArray | None = None  # a copy of gradients that the servers do not reach
        self._landing: FloatArray | None = None  # where servers write the parameters, except in sync mode
        self.servers = tuple(servers)
        self.step = 0
        self._gathers = 0
        self._ahead: Commit | None = None  # how the step under way was committed ahead
        self._may_commit_ahead = self._may_hold = False
        self._changed = threading.Condition()
        self._sessions: list[Session] = []
        self._buckets: tuple[Bucket, ...] = ()
        self.gradients: FloatArray = np.empty(0, np.float32)  # what is pushed, or after `average`, the mean
        self.trace: Trace = NO_TRACE
        self._channels = ExitStack()
        self._process = os.getpid()
        forget_in_children(self)
        try:
            for index, address in enumerate(servers):
                name, channel, reply = self._join(index, address)
                self._sessions.append(Session(name, channel, reply.desk, self._changed))
                hello = Hello(epoch=self.epoch, rank=rank, token=reply.token)
                self._sessions[-1].send([TrainerMessage(hello=hello)])
        except BaseException as exc:
            self.close(f"{type(exc).__name__}: {exc}")
            raise

    @property
    def data_plane(self) -> str:
        """What carries the data: "shm", "grpc", or "shm+grpc" where it is not the same with all servers."""
        return "+".join(sorted({"grpc" if s.plane.refusal else "shm" for s in self._sessions}, reverse=True))

    def empty(self, count: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """A new 1-D array of zeros, 64-byte aligned, that servers of this host reach without a copy."""
        return self._pool.empty(count, dtype)

    def register(self, arena: Arena, optimizer: Optimizer | None) -> None:
        """Agree on layout and optimizer; `arena.parameters` becomes rank 0's. Blocks until all trainers have called.

        The arena is used by every later call, and must outlive the client. Without an optimizer there is none until
        `configure`, and steps end with `average`. With one, in sync mode, parameters from `empty` may become memory
        common to all trainers of the host, which only servers may write to.

        Raises:
            UsageError: the data plane is to be shm, and a server cannot be reached so; or there is no optimizer,
                without which the mode must be sync.
        """
        self._check_process()
        if self.mode != SYNC and not optimizer:
            raise UsageError(f"mode {self.mode} needs the optimizer when the training begins; use mode sync")
        self._arena, self._buckets, self.gradients = arena, arena.buckets, arena.gradients
        for session, shard in zip(self._sessions, plan_shards(arena.layout.length, len(self.servers)), strict=True):
            session.shard, session.served = shard, arena.parameters
        message = describe(arena, optimizer, rank=self.rank, epoch=self.epoch)
        if self.mode != SYNC:
            message.mode = str(self.mode)
        message.trace = self.trace.active
        if self._asked_plane != "grpc" and self.mode != SYNC:
            self._landing = self._within_reach(arena.parameters)
        served_to = arena.parameters if self._landing is None and optimizer else self._landing
        for session in self._sessions:
            mine = message if self._asked_plane == "grpc" else self._with_memory(message, session, served_to)
            session.send([TrainerMessage(register=mine)])
        self._send_parameters()
        self._wait(lambda session: session.version >= 0, "registering")
        self._share_memory()
        self._may_commit_ahead = self.mode == SYNC and optimizer is not None
        self._may_hold = all(session.plane.refusal for session in self._sessions)

    def push(self, bucket: int) -> None:
        """Send a bucket's gradients, each server its part. Returns at once; they must stay as they are until `commit`
        has returned."""
        self._check_process()
        where = self._buckets[bucket]
        if not self._told_of_gradients:
            self._tell_of_gradients()
        if self._staging is not None:
            self._staging[where.start : where.stop] = self.gradients[where.start : where.stop]
        for session in self._sessions:
            part = shard_of_bucket(session.shard, where)
            if not part.length:
                continue
            if session.plane.refusal:
                gradients = self.gradients[part.start : part.stop]
                label = {"epoch": self.epoch, "step": self.step, "bucket": bucket}
                messages = frames(TrainerMessage, "gradients", gradients, first=part.start, **label)
                session.send(self.trace.sending(messages, bucket))
            else:
                words = Chunk(epoch=self.epoch, step=self.step, bucket=bucket, start=part.start, size=part.length)
                self.trace.moment("sent", bucket)
                session.note(TrainerMessage(gradients=words))

    def commit_ahead(self, learning_rate: float, *, hold: bool = False) -> None:
        """Tell the servers that the step under way will end with an update at this learning rate: they then update
        what they average at once, and send what is new while other gradients are still being pushed. Only in sync mode
        and with an optimizer; elsewhere nothing happens until `commit`.

        Args:
            hold: parameters stay as they are until `commit`, which only those can that come over gRPC: elsewhere
                nothing happens. Otherwise they may change at once.
        """
        self._check_process()
        if self._ahead is not None or not self._may_commit_ahead or (hold and not self._may_hold):
            return
        self._ahead = Commit(update=True, learning_rate=learning_rate)
        if hold:
            for session in self._sessions:
                session.welcome.clear()
        self._send_commit(Commit(update=True, learning_rate=learning_rate, ahead=True), self._arena.parameters)

    def commit(self, learning_rate: float, *, used: bytes = b"", again: bool = False, replaced: bool = False) -> None:
        """End the step, all buckets having been pushed: blocks until the new parameters are in the arena.

        Args:
            used: a byte for each slot, not zero if backward reached it; empty: it reached all.
            again: nothing was pushed; use the average that ended the step before.
            replaced: the arena's parameters were changed since the last step: go on from rank 0's.
        """
        self._check_process()
        if replaced:
            self._send_parameters()
        self._end_step(
            Commit(update=True, learning_rate=learning_rate, used=used, again=again, replaced=replaced),
            self._arena.parameters,
        )

    def average(self) -> None:
        """End the step, all buckets having been pushed, without an update: blocks until the mean gradients are in the
        arena."""
        self._check_process()
        self._end_step(Commit(), self.gradients)

    def pull(self) -> None:
        """Between steps, not in sync mode: blocks until the servers' present parameters are in the arena."""
        self._check_process()
        for session in self._sessions:
            session.served, session.version = self._arena.parameters, self.step - 1
            session.note(TrainerMessage(pull=Pull(epoch=self.epoch, step=self.step)))
        self._wait_for_step(self.step, "waiting for the parameters")
        self._copy_out(self._arena.parameters, [session.parameters for session in self._sessions])

    def check(self) -> None:
        """Does not block.

        Raises:
            GradSyncError: the group has failed.
        """
        if error := next((session.error for session in self._sessions if session.error), None):
            raise error

    def configure(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        """Name the optimizer of later updates, and each slot as its state's keys do ("": it is no parameter)."""
        self._check_process()
        message = Configure(epoch=self.epoch, rank=self.rank, optimizer=optimizer_message(optimizer), names=names)
        self._names = list(names)
        for session in self._sessions:
            session.send([TrainerMessage(configure=message)])

    def optimizer_state(self) -> dict[str, npt.NDArray[Any]]:
        """What the servers' optimizers keep, by Paddle's keys, with the slots' names; needs no other trainer."""
        self._check_process()
        for session in self._sessions:
            session.state = []
            session.send([TrainerMessage(state_request=StateRequest(epoch=self.epoch))])
        self._wait(lambda session: bool(session.state) and session.state[-1].last, "asking for the optimizer's state")
        found: dict[str, npt.NDArray[Any]] = {}
        for session in self._sessions:
            for run in state_of(session.state):
                whole = found.setdefault(run.key, np.zeros(run.size, run.values.dtype))
                whole[run.first : run.first + run.values.size] = run.values
            session.state = []
        return {key: self._shaped(key, found[key]) for key in self._in_paddles_order(found)}

    def load_optimizer_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Have the servers' optimizers go on from a state as `optimizer_state` gives it. Rank 0's counts.

        Raises:
            UsageError: it belongs to other parameters.
        """
        self._check_process()
        slots = self._arena.layout.slots
        placed: list[tuple[str, int, npt.NDArray[Any]]] = []
        for key, value in state.items():
            index = slot_of_key(key, self._names)
            if index is None:
                raise UsageError(f"the optimizer state has {key}, which belongs to no parameter of this model")
            if value.size not in (1, slots[index].size):
                raise UsageError(
                    f"the optimizer state's {key} has {value.size} elements, its parameter {slots[index].size}"
                )
            placed.append((key, index, value.reshape(-1)))
        if self.rank != 0:
            return
        for session in self._sessions:
            mine = []
            parts = {p.slot: p for p in parts_of(self._arena.layout, self._names, *astuple(session.shard))}
            for key, index, value in placed:
                if (part := parts.get(index)) is not None:
                    whole = is_number(key) or value.size != part.size
                    run = value if whole else value[part.first : part.first + part.count]
                    mine.append(Accumulator(key, index, value.size, 0 if whole else part.first, run))
            session.send(TrainerMessage(state=piece) for piece in state_pieces(mine, epoch=self.epoch))

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Every trainer's `values` (equal shape and dtype), stacked in rank order; not within a step."""
        self._check_process()
        mine = np.array(values, order="C")
        sequence, self._gathers = self._gathers, self._gathers + 1
        first = self._sessions[0]
        mine_in_pieces = pieces(mine.tobytes(), epoch=self.epoch, sequence=sequence)
        first.send(TrainerMessage(gather=piece) for piece in mine_in_pieces)
        self._wait(lambda session: session is not first or sequence in session.gathered, "gathering")
        data = bytes(first.gathered.pop(sequence))
        if len(data) != self.nranks * mine.nbytes:
            raise ProtocolError(
                f"all_gather: ranks gave {len(data)} bytes together, expected {self.nranks * mine.nbytes}"
            )
        return np.array(np.frombuffer(data, mine.dtype).reshape(self.nranks, *mine.shape))

    def ask_servers(self, *, events: bool = False) -> list[ServerAnswer]:
        """See TracedServers."""
        self._check_process()
        return [session.ask(events=events, timeout=self.timeout) for session in self._sessions]

    def forget(self) -> None:
        """In a forked child, whose open connections would hide from the servers that the trainer died."""
        self._others_memory.hang_up()
        rpc.let_go(self.servers)

    def close(self, reason: str = "") -> None:
        """Leave the group; idempotent. In a forked child it does nothing."""
        if os.getpid() != self._process:
            return
        goodbye = TrainerMessage(goodbye=Goodbye(epoch=self.epoch, reason=reason))
        if reason and (heard := next((session.error for session in self._sessions if session.error), None)):
            goodbye.goodbye.because.kind, goodbye.goodbye.because.message = type(heard).__name__, str(heard)
        if self._common:  # what this process writes from now on is its own affair
            segment, address = self._common
            segment.lay_over(address, private=True)
            self._common = None
        while self._sessions:
            self._sessions.pop().close(goodbye)
        self._channels.close()
        self._others_memory.close()
        self._pool.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(f"the client is that of process {self._process}, from which this one was forked")

    def _shaped(self, key: str, whole: npt.NDArray[Any]) -> npt.NDArray[Any]:
        slot = self._arena.layout.slots[slot_of_key(key, self._names) or 0]
        return whole if is_number(key) else whole.reshape(slot.shape)

    def _in_paddles_order(self, keys: Iterable[str]) -> list[str]:
        """One kind of accumulator after the other, each in the order of the parameters."""
        placed = [(key, slot_of_key(key, self._names) or 0) for key in keys]
        kinds = list(dict.fromkeys(key[len(self._names[slot]) :] for key, slot in placed))
        placed.sort(key=lambda each: (kinds.index(each[0][len(self._names[each[1]]) :]), each[1]))
        return [key for key, _ in placed]

    def _with_memory(self, message: Register, session: Session, served_to: FloatArray | None) -> Register:
        """The message to a server, which is handed this trainer's memory if it is within reach."""
        mine = Register()
        mine.CopyFrom(message)
        try:
            session.link = self._others_memory.visit(session.desk)
            session.link.give(self._probe)
            place = Place() if served_to is None else place_of(served_to, self._pool, session.link.give)
            if place.HasField("memory"):
                mine.parameters.CopyFrom(place)
            mine.probe.CopyFrom(memory_of(self._probe))
        except Unreachable as exc:
            session.out_of_reach = str(exc)
        return mine

    def _share_memory(self) -> None:
        """Find out where the servers have their data, and tell where the gradients are."""
        near = [session for session in self._sessions if not session.plane.refusal]
        for session in self._sessions:
            if session.plane.refusal and self._asked_plane == "shm":
                why = session.out_of_reach or session.plane.refusal
                raise UsageError(
                    f"{session.name} and rank {self.rank} cannot share memory: {why}; use --data-plane auto or grpc"
                )
        with self._within_servers_memory():
            for session in near if self.mode == SYNC else []:
                session.parameters = self._others_memory.array(session.plane.parameters, session.shard.length)
            for session in near:
                lanes = Lanes(self._others_memory.segment(session.plane.lanes), self.nranks)
                session.lanes = lanes.to_server[self.rank], lanes.to_trainer[self.rank]
        if self._landing is not None and self._landing is not self._arena.parameters:
            for session in near:
                session.parameters = self._landing[session.shard.start : session.shard.stop]
        if near and all(session.plane.in_place for session in near):
            self._have_parameters_in_common(near)
        self._copy_out(self._arena.parameters, [session.parameters for session in self._sessions])

    @contextmanager
    def _within_servers_memory(self) -> Iterator[None]:
        try:
            yield
        except Unreachable as exc:
            with self._changed:  # of a server that has ended meanwhile, there is no memory: it says why
                self._changed.wait_for(lambda: any(s.error for s in self._sessions), FAREWELL_S)
                if errors := [session.error for session in self._sessions if session.error]:
                    raise errors[0] from exc
            raise UsageError(
                f"rank {self.rank} cannot share memory with the servers: {exc}; use --data-plane grpc"
            ) from exc

    def gradients_in(self, array: FloatArray) -> None:
        """Push from this array, of the arena's length, from now on, and have averages written there."""
        if array.ctypes.data != self.gradients.ctypes.data:
            self.gradients, self._told_of_gradients = array, False

    def _tell_of_gradients(self) -> None:
        """Let the servers that read gradients in place know where that is."""
        self._told_of_gradients = True
        near = [session for session in self._sessions if not session.plane.refusal]
        reached = self._within_reach(self.gradients) if near else self.gradients
        self._staging = None if reached is self.gradients else reached
        for session in near:
            assert session.link is not None
            with self._within_servers_memory():
                place = place_of(reached, self._pool, session.link.give)
            session.note(TrainerMessage(gradients_at=place))

    def _within_reach(self, array: FloatArray) -> FloatArray:
        """The array, or one of its size that servers of this host reach."""
        return array if not array.size or self._pool.locate(array) else self._pool.empty(array.size)

    def _have_parameters_in_common(self, near: Sequence[Session]) -> None:
        """Map rank 0's parameters in the place of the arena's, if servers have all of them there."""
        parameters = self._arena.parameters
        where = self._pool.locate(parameters)
        if self.rank == 0 and where:
            self._common = self._pool.segments[where[0]], self._pool.segments[where[0]].address
            for session in near:
                session.parameters = None
            return
        memories = [session.plane.parameters.memory for session in near]
        common = {memory.key for memory in memories}
        offsets = {session.plane.parameters.offset - 4 * session.shard.start for session in near}
        whole = (len(near), len(common), offsets) == (len(self._sessions), 1, {0})
        if whole and where and where[1] == 0:
            mine, theirs = self._pool.segments[where[0]], self._others_memory.segment(near[0].plane.parameters.memory)
            if mine.nbytes == theirs.nbytes:
                theirs.lay_over(mine.address)
                self._common = theirs, mine.address
                for session in near:
                    session.parameters = None

    def _copy_out(self, out: FloatArray, of_sessions: Sequence[FloatArray | None]) -> None:
        for session, source in zip(self._sessions, of_sessions, strict=True):
            if source is not None:
                out[session.shard.start : session.shard.stop] = source

    def _send_parameters(self) -> None:
        """Rank 0's parameters are everybody's."""
        if self.rank != 0:
            return
        for session in self._sessions:
            shard = session.shard
            mine = self._arena.parameters[shard.start : shard.stop].copy()
            session.send(
                frames(TrainerMessage, "parameters", mine, first=shard.start, epoch=self.epoch, step=self.step)
            )

    def _end_step(self, commit: Commit, served: FloatArray) -> None:
        if self._ahead is None:
            self._send_commit(commit, served)
        elif commit != self._ahead:
            raise ValueError(
                f"step {self.step} was committed ahead as an update at learning rate {self._ahead.learning_rate:g}; "
                "it cannot end in another way"
            )
        self._ahead = None
        for session in self._sessions:
            session.welcome.set()
        self._wait_for_step(self.step + 1, f"waiting for the result of step {self.step}")
        self.step += 1
        self._copy_out(served, [s.parameters if commit.update else self._average_of(s) for s in self._sessions])
        self.trace.moment("received")

    def _average_of(self, session: Session) -> FloatArray | None:
        """The averaged gradients that ended the step, in the server's memory; None if they were sent."""
        if session.plane.refusal:
            return None
        with self._within_servers_memory():
            return self._others_memory.array(session.average_at, session.shard.length)

    def _send_commit(self, commit: Commit, served: FloatArray) -> None:
        """Tell all servers how the step ends; what they answer is written to `served`."""
        message = TrainerMessage(commit=commit)
        message.commit.epoch, message.commit.step = self.epoch, self.step
        for session in self._sessions:
            session.served = served
            session.note(message)

    def _settled(self, done: Any) -> bool:
        return self._failed() or all(done(s) for s in self._sessions)

    def _failed(self) -> bool:
        return any(s.error for s in self._sessions)

    def _join(self, index: int, address: str) -> tuple[str, grpc.Channel, JoinReply]:
        """What the server is called, the channel to it and what it answered."""
        name = f"server {index} at {address}"
        deadline = time.monotonic() + self.timeout
        channel = self._channels.enter_context(rpc.connect(address, timeout=self.timeout))
        call = channel.unary_unary(
            JOIN, request_serializer=JoinRequest.SerializeToString, response_deserializer=JoinReply.FromString
        )
        request = JoinRequest(
            version=__version__,
            rank=self.rank,
            nranks=self.nranks,
            epoch=self.epoch,
            backend="grpc",
            timeout=self.timeout,
        )
        request.proof = proof_of(request, job_secret())
        try:
            reply = call(request, timeout=max(0.0, deadline - time.monotonic()) + GRACE)
        except grpc.RpcError as exc:
            raise rpc.translate(exc, name, "joining the group") from exc
        if (reply.shard, reply.shards) != (index, len(self.servers)):
            raise UsageError(
                f"{name} is shard {reply.shard}/{reply.shards}, but number {index} of {len(self.servers)} listed; "
                "list all servers in the order of their --shard"
            )
        return name, channel, reply

    def _wait_for_step(self, version: int, doing: str) -> None:
        """Wait for what is served at the end of a step, which servers that share memory announce in their lanes."""
        begun = time.monotonic()
        for session in self._sessions:
            while session.lanes and session.version < version and not self._failed():
                if time.monotonic() > max(begun, session.heard_at) + self.timeout + GRACE:
                    break
                session.hear(SLICE_S)
        self._wait(lambda session: session.version >= version, doing, begun=begun)

    def _wait(self, done: Any, doing: str, *, begun: float | None = None) -> None:
        """Wait until `done` holds for every session; the server, which knows more, is the first to complain. The limit
        counts from the last sign of life, for a large model may take longer to arrive."""
        begun = time.monotonic() if begun is None else begun
        with self._changed:
            while not self._settled(done):
                waited_for = [s for s in self._sessions if not done(s)]
                deadline = max(begun, *(s.heard_at for s in waited_for)) + self.timeout + GRACE
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait_for(lambda: self._settled(done), remaining)
            for session in self._sessions:
                if session.error:
                    raise session.error
            for session in self._sessions:
                if not done(session):
                    session.error = PeerStalled(  # which the other servers are told as we leave
                        f"{session.name} did not answer within {self.timeout:g} s while {doing}; "
                        "it is frozen or overloaded"
                    )
                    raise session.error
