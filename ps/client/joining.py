"""How a trainer joins the group of one server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import grpc

from common import __version__
from common.errors import UsageError
from common.network import rpc
from common.network.gradsync_pb2 import JoinReply, JoinRequest
from common.network.rendezvous import GRACE, job_secret, proof_of
from ps.planes.methods import JOIN

__all__ = ["Joined", "join"]


@dataclass(frozen=True)
class Joined:
    """A server whose group is complete.

    Args:
        name: what it is called in messages.
        host: where it is.
        desk: where memory can be handed in; "": nowhere.
        data_port: of data connections; 0: none.
        token: by which the trainer takes its seat.
    """

    name: str
    channel: grpc.Channel
    host: str
    desk: str
    data_port: int
    token: bytes


def join(
    servers: Sequence[str], index: int, channels: ExitStack, *, rank: int, nranks: int, epoch: int, timeout: float
) -> Joined:
    """Join the group of one of these servers; blocks until all its trainers have.

    Args:
        channels: closes the channel that is opened.

    Raises:
        PeerUnreachable, RendezvousError, VersionMismatch: the group did not come together.
        UsageError: the server has another number.
    """
    name = f"server {index} at {servers[index]}"
    deadline = time.monotonic() + timeout
    channel = channels.enter_context(rpc.connect(servers[index], timeout=timeout))
    call = channel.unary_unary(
        JOIN, request_serializer=JoinRequest.SerializeToString, response_deserializer=JoinReply.FromString
    )
    request = JoinRequest(version=__version__, rank=rank, nranks=nranks, epoch=epoch, backend="grpc", timeout=timeout)
    request.proof = proof_of(request, job_secret())
    try:
        reply = call(request, timeout=max(0.0, deadline - time.monotonic()) + GRACE)
    except grpc.RpcError as exc:
        raise rpc.translate(exc, name, "joining the group") from exc
    if (reply.shard, reply.shards) != (index, len(servers)):
        raise UsageError(
            f"{name} is shard {reply.shard}/{reply.shards}, but number {index} of {len(servers)} listed; "
            "list all servers in the order of their --shard"
        )
    host = rpc.host_of(servers[index]).strip("[]")
    return Joined(name, channel, host, reply.desk, reply.data_port, reply.token)
