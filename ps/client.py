"""A trainer's side of the parameter server: one session with each server, pushed to and heard from in parallel."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from common import __version__, rpc
from common.arena import Arena, FloatArray
from common.buckets import Bucket
from common.config import check_rank
from common.errors import GradSyncError, PeerStalled, ProtocolError, UsageError, error_from_name
from common.gradsync_pb2 import (
    Chunk,
    Commit,
    Goodbye,
    Hello,
    JoinReply,
    JoinRequest,
    ServerMessage,
    TrainerMessage,
)
from common.optimizers import Optimizer
from common.rendezvous import GRACE
from ps.servicer import JOIN, SESSION
from ps.shards import Shard, plan_shards, shard_of_bucket
from ps.wire import chunks, data_of, describe, pieces

__all__ = ["Client"]

FAREWELL_S = 2.0  # how long a leaving trainer waits for a server to take note


class Session:
    """The stream between this trainer and one server. What arrives is noted here, and `changed` is notified."""

    def __init__(self, name: str, channel: grpc.Channel, changed: threading.Condition) -> None:
        self.name = name
        self.heard_at = time.monotonic()
        self.version = -1  # how many steps the parameters that have wholly arrived are old
        self.gathered: dict[int, bytearray] = {}  # by sequence number
        self._gathering = bytearray()  # what has arrived of the next one
        self.error: GradSyncError | None = None
        self.shard = Shard(0, 0)
        self.initial: FloatArray = np.empty(0, np.float32)  # what rank 0's parameters are written to,
        self.served: FloatArray = np.empty(0, np.float32)  # and what is served after each step; the whole arena's
        self._changed = changed
        self._outbox: queue.SimpleQueue[Iterable[TrainerMessage] | None] = queue.SimpleQueue()
        self._leaving = False
        self._call: Any = channel.stream_stream(
            SESSION,
            request_serializer=TrainerMessage.SerializeToString,
            response_deserializer=ServerMessage.FromString,
        )(self._outgoing())
        self._listener = threading.Thread(target=self._listen, name="gradsync-listener", daemon=True)
        self._listener.start()

    def send(self, messages: Iterable[TrainerMessage]) -> None:
        """Queue messages; an iterator is drawn from only as they are about to be sent."""
        self._outbox.put(messages)

    def close(self, goodbye: TrainerMessage) -> None:
        self._leaving = True
        self._outbox.put([goodbye])
        self._outbox.put(None)
        self._listener.join(FAREWELL_S)
        self._call.cancel()
        self._listener.join()

    def _outgoing(self) -> Iterator[TrainerMessage]:
        while (messages := self._outbox.get()) is not None:
            yield from messages

    def _listen(self) -> None:
        try:
            for message in self._call:
                self._handle(message)
            self._note_error(ProtocolError(f"{self.name} ended the session without a reason"))
        except grpc.RpcError as exc:
            self._note_error(rpc.translate(exc, self.name, "training"))
        except GradSyncError as exc:
            self._note_error(exc)
            self._call.cancel()

    def _handle(self, message: ServerMessage) -> None:
        self.heard_at = time.monotonic()
        kind = message.WhichOneof("kind")
        if kind == "parameters":
            self._store(message.parameters)
            return
        with self._changed:
            if kind == "served":
                self.version = message.served.step
            elif kind == "gathered":
                self._gathering += message.gathered.data
                if len(self._gathering) == message.gathered.size:
                    self.gathered[message.gathered.sequence] = self._gathering
                    self._gathering = bytearray()
            elif kind == "failure":
                self.error = self.error or error_from_name(message.failure.kind, message.failure.message)
            self._changed.notify_all()

    def _store(self, chunk: Chunk) -> None:
        data = data_of(chunk)
        if not self.shard.start <= chunk.start <= chunk.start + data.size <= self.shard.stop:
            raise ProtocolError(
                f"{self.name} sent elements {chunk.start}..{chunk.start + data.size} outside {self.shard}"
            )
        if chunk.step != self.version + 1:
            raise ProtocolError(f"{self.name} sent parameters of step {chunk.step}, expected {self.version + 1}")
        target = self.initial if chunk.step == 0 else self.served
        target[chunk.start : chunk.start + data.size] = data

    def _note_error(self, error: GradSyncError) -> None:
        with self._changed:
            if not self._leaving:
                self.error = self.error or error
            self._changed.notify_all()


class Client:
    """One trainer's membership in a group of `nranks` trainers and `servers`; a context manager.

    Every blocking method waits at most `timeout` seconds for the other processes.

    Raises:
        PeerUnreachable, RendezvousError, VersionMismatch, UsageError: the group did not come together.
    """

    def __init__(self, servers: Sequence[str], rank: int, nranks: int, *, timeout: float = 30.0) -> None:
        check_rank(rank, nranks)
        self.rank, self.nranks, self.timeout, self.epoch = rank, nranks, timeout, 0
        self.servers = tuple(servers)
        self.step = 0
        self._gathers = 0
        self._changed = threading.Condition()
        self._sessions: list[Session] = []
        self._buckets: tuple[Bucket, ...] = ()
        self._gradients: FloatArray = np.empty(0, np.float32)
        self._channels = ExitStack()
        try:
            for index, address in enumerate(servers):
                self._sessions.append(Session(*self._join(index, address), self._changed))
                self._sessions[-1].send([TrainerMessage(hello=Hello(epoch=self.epoch, rank=rank))])
        except BaseException as exc:
            self.close(f"{type(exc).__name__}: {exc}")
            raise

    def register(self, arena: Arena, optimizer: Optimizer | None) -> None:
        """Agree on layout and optimizer; `arena.parameters` becomes rank 0's. Blocks until all trainers have called.

        The arena is used by every later call, and must outlive the client. Without an optimizer the servers average
        only: `commit` then leaves the mean gradients in the arena, and parameters alone.
        """
        self._buckets, self._gradients = arena.buckets, arena.gradients
        shards = plan_shards(arena.layout.length, len(self.servers))
        for session, shard in zip(self._sessions, shards, strict=True):
            session.shard, session.initial = shard, arena.parameters
            session.served = arena.parameters if optimizer else arena.gradients
            session.send([TrainerMessage(register=describe(arena, optimizer, rank=self.rank, epoch=self.epoch))])
            if self.rank == 0:
                mine = arena.parameters[shard.start : shard.stop].copy()
                pieces = chunks(mine, first=shard.start, epoch=self.epoch, step=0)
                session.send(TrainerMessage(parameters=piece) for piece in pieces)
        self._wait(lambda session: session.version >= 0, "registering")

    def push(self, bucket: int) -> None:
        """Send a bucket's gradients, each server its part. Returns at once; they must stay as they are until `commit`
        has returned."""
        where = self._buckets[bucket]
        for session in self._sessions:
            part = shard_of_bucket(session.shard, where)
            gradients = self._gradients[part.start : part.stop]
            pieces = chunks(gradients, first=part.start, epoch=self.epoch, step=self.step, bucket=bucket)
            session.send(TrainerMessage(gradients=piece) for piece in pieces)

    def commit(self, learning_rate: float) -> None:
        """End the step, all buckets having been pushed: blocks until the new parameters are in the arena."""
        commit = Commit(epoch=self.epoch, step=self.step, learning_rate=learning_rate)
        for session in self._sessions:
            session.send([TrainerMessage(commit=commit)])
        self._wait(lambda session: session.version > self.step, f"waiting for the parameters of step {self.step}")
        self.step += 1

    def all_gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Every trainer's `values` (equal shape and dtype), stacked in rank order; not within a step."""
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

    def close(self, reason: str = "") -> None:
        """Leave the group; idempotent."""
        goodbye = TrainerMessage(goodbye=Goodbye(epoch=self.epoch, reason=reason))
        while self._sessions:
            self._sessions.pop().close(goodbye)
        self._channels.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")

    def _settled(self, done: Any) -> bool:
        return any(s.error for s in self._sessions) or all(done(s) for s in self._sessions)

    def _join(self, index: int, address: str) -> tuple[str, grpc.Channel]:
        name = f"server {index} at {address}"
        deadline = time.monotonic() + self.timeout
        channel = self._channels.enter_context(rpc.connect(address, timeout=self.timeout))
        call = channel.unary_unary(
            JOIN, request_serializer=JoinRequest.SerializeToString, response_deserializer=JoinReply.FromString
        )
        request = JoinRequest(version=__version__, rank=self.rank, nranks=self.nranks, epoch=self.epoch, backend="grpc")
        try:
            reply = call(request, timeout=max(0.0, deadline - time.monotonic()) + GRACE)
        except grpc.RpcError as exc:
            raise rpc.translate(exc, name, "joining the group") from exc
        if (reply.shard, reply.shards) != (index, len(self.servers)):
            raise UsageError(
                f"{name} is shard {reply.shard}/{reply.shards}, but number {index} of {len(self.servers)} listed; "
                "list all servers in the order of their --shard"
            )
        return name, channel

    def _wait(self, done: Any, doing: str) -> None:
        """Wait until `done` holds for every session; the server, which knows more, is the first to complain. The limit
        counts from the last sign of life, for a large model may take longer to arrive."""
        begun = time.monotonic()
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
                    raise PeerStalled(
                        f"{session.name} did not answer within {self.timeout:g} s while {doing}; "
                        "it is frozen or overloaded"
                    )
