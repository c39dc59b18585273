"""The stream between a trainer and one server: what is sent goes in order, what comes is put into the inbox."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from common.errors import GradSyncError, ProtocolError
from common.network import rpc
from common.network.gradsync_pb2 import Alive, TraceReply, TraceRequest, TrainerMessage
from common.sync.trace import ServerAnswer
from ps.client.inbox import FAREWELL_S, Inbox
from ps.client.joining import Joined
from ps.client.mail import Mail
from ps.planes.grpc_plane import GrpcTrainerPlane
from ps.planes.methods import SESSION, TRACE
from ps.planes.plane import TrainerPlane
from ps.planes.sealing import sealing_to
from ps.planes.send_queue import SendQueue
from ps.planes.wire_format import Outgoing, parts_of, read_server
from ps.store.shards import Shard

__all__ = ["Session"]


class Session:
    """
    Args:
        changed: is notified when something has come.
        epoch: of the group; what is of another one is refused.
        mail: takes what other trainers send, if it comes by this session.
    """

    def __init__(self, joined: Joined, changed: threading.Condition, epoch: int = 0, mail: Mail | None = None) -> None:
        self.name, self.joined = joined.name, joined
        self.inbox = Inbox(joined.name, changed, epoch, mail, joined.host)
        self._sealing = sealing_to(joined.host)
        self.plane: TrainerPlane = GrpcTrainerPlane(self)  # until another one is agreed on
        self._queue: SendQueue[TrainerMessage | Outgoing] = SendQueue()
        self.inbox.answer = lambda: self._queue.put([TrainerMessage(alive=Alive())])
        if mail:
            mail.say = lambda message: self._queue.put([message])
        self._trace_of = joined.channel.unary_stream(
            TRACE, request_serializer=TraceRequest.SerializeToString, response_deserializer=TraceReply.FromString
        )
        session: Any = joined.channel.stream_stream(SESSION, request_serializer=self._to_bytes)
        self._call: Any = session(iter(self._queue), metadata=self._sealing.metadata)
        self._listener = threading.Thread(target=self._listen, name="gradsync-listener", daemon=True)
        self._listener.start()

    def _to_bytes(self, message: TrainerMessage | Outgoing) -> bytes:
        return self._sealing.seal(*parts_of(message))

    @property
    def shard(self) -> Shard:
        """What of the arena the server has."""
        return self.inbox.shard

    @property
    def unanswered(self) -> bool:
        """See Stream."""
        return self.inbox.unanswered

    def send(self, messages: Iterable[TrainerMessage | Outgoing]) -> None:
        """Send these after all that was sent before, as the plane does."""
        self.plane.say(messages)

    def post(self, messages: Iterable[TrainerMessage | Outgoing]) -> None:
        """Queue messages for gRPC, as SendQueue.put."""
        self.inbox.has_sent()
        self._queue.put(messages)

    def welcome(self) -> None:
        """Results that were kept back are taken from now on."""
        self.inbox.welcome()
        self.plane.welcome()

    def use(self, plane: TrainerPlane) -> None:
        """Data travel so from now on."""
        self.plane = plane

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

    def close(self, goodbye: TrainerMessage) -> None:
        """Say goodbye, and wait a little for the server to take note."""
        self.inbox.close()
        self._queue.put([goodbye])
        self._queue.end()
        self._listener.join(FAREWELL_S)
        self._call.cancel()
        self._listener.join()
        self.inbox.release()
        self.plane = GrpcTrainerPlane(self)  # which has no arrays yet

    def _listen(self) -> None:
        try:
            for data in self._call:
                frame = read_server(self._sealing.unseal(data, self.name))
                self.inbox.take(frame.message, frame.words)
            self.inbox.fail(ProtocolError(f"{self.name} ended the session without a reason"))
        except grpc.RpcError as exc:
            self.inbox.fail(told_meanwhile(self.joined.call) or rpc.translate(exc, self.name, "training"))
        except DecodeError:
            self.inbox.fail(ProtocolError(f"{self.name} sent a message that cannot be decoded ({len(data):,} bytes)"))
            self._call.cancel()
        except GradSyncError as exc:
            self.inbox.fail(exc)
            self._call.cancel()


def told_meanwhile(joining: Any) -> GradSyncError | None:
    """What the server has ended the call with by which we joined: others were lost before we said hello. None: it has
    not, or there was none."""
    with suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
        if joining is not None and (error := joining.exception(FAREWELL_S)):
            return rpc.error_told(error)
    return None
