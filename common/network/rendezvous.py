"""How the ranks of a group find each other: everyone says hello to one place and learns of all the others.

Who calls has shown by then that it belongs to the job (rpc.py). `Roster` holds the rules and knows nothing of gRPC; a
parameter server uses it too.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from common import __version__
from common.errors import GradSyncError, ProtocolError, RendezvousError, StaleEpoch, VersionMismatch
from common.network import rpc
from common.network.callers import MOST_CALLERS, Callers
from common.network.gradsync_pb2 import JoinReply, JoinRequest

__all__ = ["Membership", "RendezvousServer", "Roster", "join", "read_join"]

SERVICE = "gradsync.Rendezvous"
METHOD = f"/{SERVICE}/Join"
LATECOMERS_S = 5.0
FLAGS = {  # that say which member, and of how many; of tasks their engine does
    "rank": ("--rank", "--nranks"),
    "host": ("--node-rank", "--nnodes"),
    "task": ("number", "number of tasks"),
}
GRACE = 1.0  # seconds a caller waits beyond the limit, so that the better-informed answer comes first


class Roster:
    """Who has joined. Complete when every rank 0..nranks-1 has, and then closed to strangers; failed, for all, at the
    first contradiction before that, or when somebody has waited too long. Who has left while it waited was never there.

    Args:
        member: what its ranks are called in errors: "rank", "host" where launchers meet, or "task".
        epoch: who is of another one is sent away, and does the group no harm.
    """

    def __init__(self, nranks: int, *, member: str = "rank", epoch: int = 0) -> None:
        self.nranks, self.epoch = nranks, epoch
        self.member = member
        self._flag, self._size_flag = FLAGS[member]
        self.members: dict[int, JoinRequest] = {}
        self.failure: GradSyncError | None = None
        self._calls = 0
        self._timed_out = False
        self._changed = threading.Condition()

    def wait_for_all(
        self, request: JoinRequest, timeout: float, *, call: grpc.ServicerContext | None = None
    ) -> list[JoinRequest]:
        """Add a member and wait until all are there; returns them in rank order, or nothing if the member has left
        meanwhile: it may come again.

        Args:
            timeout: in seconds; less, if the call has less time.
            call: the member's, who leaves by ending it, on purpose or by dying.

        Raises:
            RendezvousError, VersionMismatch: the same one at every waiting member.
            StaleEpoch: at this one alone.
        """
        if request.epoch != self.epoch:
            raise StaleEpoch(
                f"{self.member} {request.rank} is of epoch {request.epoch}, this is epoch {self.epoch} of the group"
            )
        remaining = call.time_remaining() if call else None
        if remaining is not None:
            timeout = max(0.0, min(timeout, remaining - GRACE / 2))
        deadline = time.monotonic() + timeout
        with self._changed:
            self._calls += 1
            objection = self._objection(request)
            if objection and self.complete:
                raise objection  # of no concern to a group that is there
            self.failure = self.failure or objection
            self.members.setdefault(request.rank, request)
            self._changed.notify_all()
            has_left = call is not None and not call.add_callback(self._look_again)
            while not (self._settled() or has_left) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
                has_left = call is not None and not call.is_active()
            if has_left and not self._settled():
                del self.members[request.rank]
                self._calls -= 1
                return []
            if not self._settled():
                self._timed_out = True
                self.fail(RendezvousError(self._absence(timeout)))
            if self.failure:
                raise self.failure
            return [self.members[rank] for rank in range(self.nranks)]

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def let_latecomers_hear(self) -> None:
        """After a contradiction, stay until every rank has called and knows why, or LATECOMERS_S seconds."""
        with self._changed:
            if self.failure and not self._timed_out:
                self._changed.wait_for(lambda: self._calls >= self.nranks, LATECOMERS_S)

    def fail(self, error: GradSyncError) -> None:
        """Fail the group for everyone who waits or comes later."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    @property
    def complete(self) -> bool:
        """All ranks have joined."""
        return self.failure is None and len(self.members) == self.nranks

    def _settled(self) -> bool:
        return self.failure is not None or self.complete

    def _objection(self, request: JoinRequest) -> GradSyncError | None:
        who = f"{self.member} {request.rank}"
        if request.version != __version__:
            return VersionMismatch(
                f"{who} runs GradSync {request.version}, this group {__version__}; install one version"
            )
        if request.nranks != self.nranks:
            return RendezvousError(
                f"{who} was started with {self._size_flag.strip('-')} {request.nranks}, "
                f"the group with {self.nranks}; give all the same {self._size_flag}"
            )
        if request.rank >= self.nranks:
            return RendezvousError(f"{who} is outside 0..{self.nranks - 1}")
        if request.rank in self.members:
            return RendezvousError(f"{who} joined twice; give every {self.member} its own {self._flag}")
        backends = {m.backend for m in self.members.values()} | {request.backend}
        if len(backends) > 1:
            return RendezvousError(
                f"ranks disagree on the backend: {', '.join(sorted(backends))}; give all the same --backend"
            )
        return None

    def _absence(self, timeout: float) -> str:
        missing = [str(rank) for rank in range(self.nranks) if rank not in self.members]
        return (
            f"{len(self.members)} of {self.nranks} {self.member}s joined within {timeout:.3g} s; "
            f"missing: {self.member} {', '.join(missing)}: not started, refused for its credentials (it says so), "
            "ended without joining, or too slow (then raise --timeout)"
        )


class RendezvousServer:
    """Rank 0's meeting place; a context manager.

    Args:
        member, epoch: see Roster.

    Raises:
        PortInUse: at construction.
    """

    def __init__(self, address: str, nranks: int, *, timeout: float, member: str = "rank", epoch: int = 0) -> None:
        self._roster = Roster(nranks, member=member, epoch=epoch)
        self._timeout = timeout
        self._token = secrets.token_bytes(16)
        self._door = Callers()
        handler: Any = grpc.stream_unary_rpc_method_handler(self._join, None, JoinReply.SerializeToString)
        threads = nranks + MOST_CALLERS + 2
        self._server, self.address = rpc.serve(address, SERVICE, {"Join": handler}, threads=threads)

    def _join(self, received: Iterator[bytes], context: grpc.ServicerContext) -> JoinReply:
        data = self._door.first_of(received, context)
        try:
            request = read_join(data)
            members = self._roster.wait_for_all(request, self._timeout, call=context)
        except GradSyncError as exc:
            rpc.abort_with(context, exc)
        return JoinReply(addresses=[m.address for m in members], token=self._token, notes=[m.note for m in members])

    def close(self) -> None:
        self._roster.let_latecomers_hear()
        if not self._roster.complete:
            self._roster.fail(RendezvousError(f"{self._roster.member} 0 left before the group was complete"))
        rpc.stop(self._server, grace=1.0)

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_join(data: bytes) -> JoinRequest:
    """
    Raises:
        ProtocolError: it is none.
    """
    try:
        return JoinRequest.FromString(data)
    except DecodeError as exc:
        raise ProtocolError(f"a caller sent a message that cannot be decoded ({len(data):,} bytes)") from exc


@dataclass(frozen=True)
class Membership:
    """What a rank knows after joining."""

    addresses: tuple[str, ...]  # of all ranks' listeners, in rank order
    token: bytes
    notes: tuple[bytes, ...] = ()  # what each rank told all others


def join(
    rendezvous: str,
    *,
    rank: int,
    nranks: int,
    backend: str,
    address: str,
    timeout: float,
    member: str = "rank",
    note: bytes = b"",
    epoch: int = 0,
) -> Membership:
    """Say hello at `rendezvous` and wait, at most `timeout` seconds, until all ranks have.

    Raises:
        PeerUnreachable: nobody listens there.
        RendezvousError, VersionMismatch, StaleEpoch: see Roster.
    """
    deadline = time.monotonic() + timeout
    with rpc.connect(rendezvous, timeout=timeout) as channel:
        call = channel.unary_unary(
            METHOD,
            request_serializer=JoinRequest.SerializeToString,
            response_deserializer=JoinReply.FromString,
        )
        request = JoinRequest(version=__version__, rank=rank, nranks=nranks, backend=backend, address=address)
        request.note, request.epoch = note, epoch
        try:
            reply = call(request, timeout=max(0.0, deadline - time.monotonic()) + GRACE)
        except grpc.RpcError as exc:
            raise rpc.translate(exc, f"{member} 0 at {rendezvous}", "joining the group") from exc
    return Membership(tuple(reply.addresses), reply.token, tuple(reply.notes))
