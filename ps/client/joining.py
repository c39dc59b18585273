"""How a trainer joins the groups of one server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc

from common import __version__
from common.errors import ProtocolError, RendezvousError, UsageError
from common.network import rpc
from common.network.gradsync_pb2 import JoinReply, JoinRequest
from common.network.rendezvous import GRACE
from common.system.process import restarts
from ps.planes.methods import JOIN

__all__ = ["Joined", "introduce_outsider", "join", "join_again"]


@dataclass(frozen=True)
class Joined:
    """A server whose group is complete.

    Args:
        name: what it is called in messages.
        host: where it is.
        desk: where memory can be handed in; "": nowhere.
        data_port: of data connections; 0: none.
        token: by which the trainer takes its seat.
        model: which of the group's models it is.
        seat: of the data connection.
        call: by which it has joined: the server takes its end before our hello for our death.
    """

    name: str
    channel: grpc.Channel
    host: str
    desk: str
    data_port: int
    token: bytes
    model: int = 0
    seat: int = 0
    call: Any = None


def join(
    servers: Sequence[str], index: int, channels: ExitStack, *, rank: int, nranks: int, epoch: int, timeout: float
) -> Joined:
    """Join the group of one of these servers, for its first model; blocks until all its trainers have.

    Args:
        channels: closes the channel that is opened.

    Raises:
        PeerUnreachable, RendezvousError, VersionMismatch: the group did not come together.
        UsageError: the server has another number.
    """
    name = f"server {index} at {servers[index]}"
    deadline = time.monotonic() + timeout
    channel = channels.enter_context(rpc.connect(servers[index], timeout=timeout))
    request = JoinRequest(version=__version__, rank=rank, nranks=nranks, epoch=epoch, backend="grpc", timeout=timeout)
    reply, call = ask(channel, request, name, deadline)
    if (reply.shard, reply.shards) != (index, len(servers)):
        raise UsageError(
            f"{name} is shard {reply.shard}/{reply.shards}, but number {index} of {len(servers)} listed; "
            "list all servers in the order of their --shard"
        )
    if reply.data_port > 65535:
        raise ProtocolError(f"{name} told of data port {reply.data_port:,}")
    host = rpc.host_of(servers[index]).strip("[]")
    return Joined(name, channel, host, reply.desk, reply.data_port, reply.token, seat=rank, call=call)


def introduce_outsider(servers: Sequence[str], rank: int, nranks: int, seconds: float) -> None:
    """Let the others know, at all servers, of a rank that is beyond the group's.

    Raises:
        PeerUnreachable: a server is not there.
    """
    for index in range(len(servers)):
        with ExitStack() as channels, suppress(RendezvousError):  # which is what the others hear, too
            join(servers, index, channels, rank=rank, nranks=nranks, epoch=restarts(), timeout=seconds)


def join_again(first: Joined, model: int, *, rank: int, nranks: int, epoch: int, timeout: float) -> Joined:
    """Join the group of a further model at the server where the first one was joined; waits for no other trainer.

    Raises:
        UsageError, ProtocolError: there are too many models, or it is not this one's turn.
        GradSyncError: what the group has failed with.
    """
    request = JoinRequest(version=__version__, rank=rank, nranks=nranks, epoch=epoch, backend="grpc", timeout=timeout)
    request.model, request.seat = model, first.token
    reply, _ = ask(first.channel, request, first.name, time.monotonic() + timeout)
    return replace(
        first, desk=reply.desk, data_port=reply.data_port, token=reply.token, model=model, seat=model * nranks + rank
    )


def ask(channel: grpc.Channel, request: JoinRequest, server: str, deadline: float) -> tuple[JoinReply, Any]:
    """What the server answers, and the call, which it leaves open; `deadline` is monotonic."""
    ask = channel.unary_stream(
        JOIN, request_serializer=JoinRequest.SerializeToString, response_deserializer=JoinReply.FromString
    )
    call = ask(request, timeout=max(0.0, deadline - time.monotonic()) + GRACE)
    try:
        return next(call), call
    except grpc.RpcError as exc:
        raise rpc.translate(exc, server, "joining the group") from exc
    except StopIteration as exc:
        raise ProtocolError(f"{server} did not answer who joins") from exc
