"""The gRPC face of a server: joins and sessions; what they mean is decided by the Coordinator of the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from common.commit.kept_parts import KeptParts
from common.errors import GradSyncError, PeerLost, ProtocolError, RendezvousError
from common.network import rpc
from common.network.callers import HELLO_S, MOST_CALLERS, MOST_HELLO, Callers
from common.network.gradsync_pb2 import (
    JoinReply,
    StatusReply,
    StatusRequest,
    TraceReply,
    TraceRequest,
    TrainerMessage,
)
from common.network.patience import WAIT_LIMIT_S
from common.network.reach import host_at
from common.network.rendezvous import Roster, read_join
from common.sync.trace import Trace
from common.system.addresses import clock_identity
from common.system.process import restarts
from common.tensors.buckets import pieces_of
from ps.coordinator.groups import MOST_MODELS, Group, Groups
from ps.coordinator.liveness import ServerQueue, tell
from ps.planes.data_port import DataPort
from ps.planes.methods import SERVICE
from ps.planes.sealing import Sealing, sealing_of
from ps.planes.wire_format import Frame, parts_of, read_trainer

__all__ = ["ParameterServer"]

SERVING = HealthCheckResponse.SERVING
MOST_READERS = 8  # of the trace at a time: each may read as slowly as it likes
FAREWELL_S = (
    1.0  # for the last messages to reach the trainers; a frozen one takes all of it, and a launcher waits 1.5 s
)
ONES_WAITING, ALL_WAITING = 8 << 20, 32 << 20  # bytes received of a trainer, or all, and not taken; gRPC has no limit


class ParameterServer:
    """Serves one training of `nranks` trainers at `address`; a context manager.

    Args:
        timeout: how long others are waited for that have not joined, or give no sign of life, in seconds.
        wait_limit: how long trainers wait for one that is alive, in seconds.
        data_port: of data connections, at the same host; 0: the system chooses.
        checkpoint_dir: where the server keeps its part of the commits that trainers ask for.
        memory: where it keeps its last step boundaries, for who goes on with them.

    Raises:
        PortInUse: at construction.
    """

    def __init__(
        self,
        address: str,
        nranks: int,
        *,
        shard: tuple[int, int] = (0, 1),
        timeout: float = 30.0,
        wait_limit: float = WAIT_LIMIT_S,
        data_port: int = 0,
        checkpoint_dir: Path | None = None,
        memory: KeptParts | None = None,
    ) -> None:
        self._shard, self._timeout = shard, timeout
        self._roster = Roster(nranks, epoch=restarts())
        port = make_data_port(address, data_port)
        self._groups = Groups(
            nranks,
            shard=shard,
            timeout=timeout,
            wait_limit=wait_limit,
            port=port,
            checkpoint_dir=checkpoint_dir,
            memory=memory,
        )
        self._coordinator = self._groups.first.coordinator
        handlers = {
            # undecoded: gRPC would end a call that it cannot decode, we would too, and `stop` would wait for ever
            # as a stream: before its message is taken, a caller has to pass the door
            "Join": grpc.stream_stream_rpc_method_handler(self._join, None, JoinReply.SerializeToString),
            "Session": grpc.stream_stream_rpc_method_handler(self._session, None, None),
            "Status": grpc.unary_unary_rpc_method_handler(
                lambda _, __: self.status(), StatusRequest.FromString, StatusReply.SerializeToString
            ),
            "Trace": grpc.unary_stream_rpc_method_handler(
                self._tell_trace, TraceRequest.FromString, TraceReply.SerializeToString
            ),
        }
        self._health = HealthServicer()
        self._door, self._readers = Callers(), threading.BoundedSemaphore(MOST_READERS)
        try:
            self._server, self.address = rpc.serve(
                address,
                SERVICE,
                handlers,
                # a session holds one, and who has not said hello; they are made when they are needed
                threads=(MOST_MODELS + 1) * nranks + MOST_CALLERS + MOST_READERS + 4,
                window=max(rpc.CHUNK_BYTES, min(ONES_WAITING, ALL_WAITING // nranks)),
                more=lambda s: add_HealthServicer_to_server(self._health, s),
            )
        except GradSyncError as exc:
            self._groups.fail(exc)
            self._groups.close()
            raise
        for service in ("", SERVICE):
            self._health.set(service, SERVING)

    @property
    def steps(self) -> int:
        """How many steps have been applied."""
        return self._coordinator.steps

    @property
    def has_met(self) -> bool:
        """Whether all trainers have joined, or it is over."""
        return self._roster.complete or self._coordinator.over

    def wait(self) -> None:
        """Block until the training is over.

        Raises:
            PeerLost, PeerStalled, LayoutMismatch, RendezvousError, ...: why it failed.
        """
        try:
            self._coordinator.wait()
        finally:
            self._health.enter_graceful_shutdown()

    def status(self) -> StatusReply:
        """How the training goes, of the first model; also by `python -m ps.status`."""
        reply = self._coordinator.status()
        reply.models = len(self._groups)
        return reply

    def straggler(self) -> str:
        """Which trainer the others waited for most often, in words; "" if there is no telling."""
        return self._coordinator.straggler()

    @property
    def trace(self) -> Trace:
        """What has been recorded, if a trainer asked for that."""
        return self._coordinator.trace

    def stop(self, reason: str) -> None:
        """End the training once no step is half done; all trainers hear why."""
        self._health.enter_graceful_shutdown()
        self._groups.stop(PeerLost(f"server {self._shard[0]} at {self.address} {reason}"), self._timeout)

    def close(self) -> None:
        """Stop serving; what has been said still reaches the trainers."""
        self._roster.let_latecomers_hear()
        closed = PeerLost(f"server {self._shard[0]} at {self.address} was closed in mid-training")
        self._groups.fail(closed)
        if not self._roster.complete:  # those who have joined wait there
            self._roster.fail(self._coordinator.failure or closed)
        self._health.enter_graceful_shutdown()
        until = time.monotonic() + FAREWELL_S
        rpc.stop(self._server, FAREWELL_S)
        self._groups.close(until)

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, received: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[JoinReply]:
        """One answer; the call stays open until the trainer says hello, so that its death meanwhile is noticed, and it
        hears if the training fails meanwhile."""
        data = self._door.first_of(received, context)
        try:
            request = read_join(data)
            further = self._groups.join(request) if request.model else None
            members = [] if further else self._roster.wait_for_all(request, self._timeout, call=context)
        except GradSyncError as exc:
            if self._roster.failure:  # a stray caller does not harm the group
                self._coordinator.fail(self._roster.failure)
            rpc.abort_with(context, exc)
        if further:
            yield self._reply(further, request.rank)
        elif members:  # else it has left
            self._coordinator.expect(min(self._timeout, *(member.timeout for member in members)))  # whom to name
            ended = partial(self._coordinator.joining_ended, request.rank, context)
            if not context.add_callback(ended):
                ended()
            yield self._reply(self._groups.first, request.rank)
            entered = self._coordinator.wait_for_hello(request.rank, context)
            if not entered and self._coordinator.failure:  # it comes too late to hear that in its session
                rpc.abort_with(context, self._coordinator.failure)

    def _reply(self, group: Group, rank: int) -> JoinReply:
        index, count = self._shard
        reply = JoinReply(shard=index, shards=count, token=group.token(rank))
        reply.desk, reply.data_port = group.coordinator.desk, group.coordinator.data_port
        return reply

    def _tell_trace(self, request: TraceRequest, context: grpc.ServicerContext) -> Iterator[TraceReply]:
        if not self._readers.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_READERS} others read the trace already")
        try:
            yield from self._trace_in_pieces(request)
        finally:
            self._readers.release()

    def _trace_in_pieces(self, request: TraceRequest) -> Iterator[TraceReply]:
        yield TraceReply(clock=time.monotonic_ns(), host=clock_identity())
        data = self.trace.packed() if request.events else b""
        for start, stop in pieces_of(0, len(data), rpc.CHUNK_BYTES):
            yield TraceReply(data=data[start:stop])

    def _session(self, received: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not self._roster.complete:
            rpc.abort_with(context, RendezvousError("a session was opened before all trainers had joined"))
        queue = ServerQueue()
        where, sealing = host_at(context.peer()), sealing_of(tuple(context.invocation_metadata()))
        told = (received, queue, where, sealing)
        reader = threading.Thread(target=self._read, args=told, name="gradsync-reader", daemon=True)
        reader.start()
        for message in queue:
            yield sealing.seal(*parts_of(message))
            del message

    def _read(self, received: Iterator[bytes], queue: ServerQueue, host: str, sealing: Sealing) -> None:
        """Feed one trainer's messages to the group until its stream ends. Who has no seat harms only himself."""
        rank, group = None, self._groups.first
        try:
            with self._door.waits(
                partial(tell, queue, ProtocolError(f"no hello within {HELLO_S:g} s, or others came"))
            ):
                first = next(received)
            if len(first) > MOST_HELLO:
                raise ProtocolError(f"a caller's first message has {len(first):,} bytes, more than {MOST_HELLO:,}")
            rank, group = self._take_seat(decoded(sealing.unseal(first, "a caller"), "a caller").message, queue)
            group.coordinator.lives.hosts[rank] = host
            del first
            for data in received:
                frame = decoded(sealing.unseal(data, f"rank {rank}"), f"rank {rank}")
                group.coordinator.handle(rank, frame.message, frame.words)
                del data, frame  # a megabyte, until the next one has come
        except GradSyncError as exc:
            if rank is None:
                tell(queue, exc)
            else:
                group.coordinator.fail(exc)
        except (grpc.RpcError, StopIteration):
            pass  # the stream broke off
        except Exception as exc:
            if rank is not None:
                group.coordinator.fail(GradSyncError(f"the server failed: {type(exc).__name__}: {exc}"))
            raise
        finally:
            if rank is not None:
                group.coordinator.lost(rank)
            queue.end()
            if rank is not None:
                self._groups.left(group, rank)

    def _take_seat(self, message: TrainerMessage, queue: ServerQueue) -> tuple[int, Group]:
        """Let in who shows the token that its rank was given when it joined; which rank it is, and for which model.

        Raises:
            ProtocolError, StaleEpoch: it has no seat.
        """
        if message.WhichOneof("kind") != "hello":
            raise ProtocolError("a trainer did not say hello before it sent anything else")
        group = self._groups.group_of(message.hello)
        rank = group.coordinator.enter(message, queue)
        self._groups.entered(group)
        return rank, group


def make_data_port(address: str, port: int) -> DataPort | None:
    """At the same host; None where there are no ports."""
    return None if address.startswith("unix") else DataPort(rpc.host_of(address).strip("[]"), port)


def decoded(data: bytes | memoryview, sender: str) -> Frame[TrainerMessage]:
    """
    Raises:
        ProtocolError: it is no message.
    """
    try:
        return read_trainer(data)
    except DecodeError as exc:
        raise ProtocolError(f"{sender} sent a message that cannot be decoded ({len(data):,} bytes)") from exc
