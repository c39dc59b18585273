"""gRPC in one place: servers and channels with our options and credentials, and the translation of every status.

Whoever takes part shows a certificate, on every address, and is refused before a method runs if it is not of this job;
nothing is asked for with --insecure only.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent import futures
from contextlib import suppress
from typing import Any, NoReturn

import grpc

from common.credentials.credentials import Credentials, current
from common.credentials.token import MAKE_TOKEN
from common.errors import (
    CredentialsRefused,
    GradSyncError,
    PeerError,
    PeerLost,
    PeerStalled,
    PeerUnreachable,
    PortInUse,
    ProtocolError,
    UsageError,
    error_from_name,
)
from common.network.members_only import MembersOnly
from common.network.why_refused import why_refused

__all__ = [
    "CHUNK_BYTES",
    "OpenChannel",
    "abort_with",
    "check_bind_host",
    "connect",
    "error_told",
    "host_of",
    "is_loopback",
    "let_go",
    "serve",
    "stop",
    "translate",
]

CHUNK_BYTES = 1 << 20  # payload of one streamed message
WINDOW_BYTES = 1 << 20  # of a stream between hosts, at most so many are under way
NO_METHOD = "/gradsync/is-anybody-there"  # who has no such method answers that, and so is there
FIRST_LOOK_S = 0.1  # at why nobody answers
CLOSE_S = 1.0  # that a channel, or a server, may take to close
NEEDED = (
    f"make a token with {MAKE_TOKEN}, copy it to all hosts and start there with --token-file FILE, or with "
    "GRADSYNC_TOKEN_FILE=FILE; on a network you trust --insecure or GRADSYNC_INSECURE=1 goes without"
)
KIND_KEY = "gradsync-error"  # trailing metadata: the error's class name

OPTIONS = [
    ("grpc.max_receive_message_length", 4 * CHUNK_BYTES),  # anything larger is refused before allocation
    ("grpc.max_send_message_length", 4 * CHUNK_BYTES),
]
CHANNEL_OPTIONS = [
    *OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own: not one that waits for TCP to send again
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # else a call that comes as the server closes may never end, whatever its deadline
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.initial_reconnect_backoff_ms", 100),
]
_used_by = 0  # the process that has used gRPC
SERVER_OPTIONS = [
    *OPTIONS,
    ("grpc.so_reuseport", 0),  # else two servers can share a port, silently
    ("grpc.max_concurrent_streams", 256),  # of one connection
    ("grpc.server_handshake_timeout_ms", 5000),  # for whoever connects and says nothing
]


def serve(
    address: str,
    service: str,
    handlers: Mapping[str, Any],
    *,
    threads: int,
    window: int | None = None,
    more: Callable[[grpc.Server], None] | None = None,
    credentials: Credentials | None = None,
) -> tuple[grpc.Server, str]:
    """Start a server for one service; return it with the address it listens on (a port 0 filled in).

    Args:
        window: how many bytes of each stream may wait here to be taken; None: gRPC chooses, and takes what it can get.
        more: adds further services.
        credentials: None: those of this process.

    Raises:
        PortInUse: naming the address.
        UsageError: other hosts would be listened to without credentials; or this process was forked from one that has
            used gRPC.
    """
    credentials = credentials or current()
    if not address.startswith("unix"):
        check_bind_host(host_of(address), credentials)
    _use_grpc()
    options = [*SERVER_OPTIONS, *flow_control(address, window)]
    interceptors: list[grpc.ServerInterceptor] = [MembersOnly(address)] if credentials.secure else []
    server = grpc.server(futures.ThreadPoolExecutor(threads), options=options, interceptors=interceptors)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, dict(handlers)),))
    if more:
        more(server)
    try:
        if credentials.secure:
            port = server.add_secure_port(address, credentials.grpc_server())
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as exc:
        raise PortInUse(
            f"cannot listen on {address}: the port is in use or the address not ours; choose another"
        ) from exc
    server.start()
    if address.startswith("unix"):
        return server, address
    return server, f"{host_of(address)}:{port}"


def stop(server: grpc.Server, grace: float) -> None:
    """Give its calls `grace` seconds to end, then end them; return within CLOSE_S after that, as OpenChannel does."""
    server.stop(grace).wait(grace + CLOSE_S)


def host_of(address: str) -> str:
    """The host of "host:port" ("[::1]:80" -> "[::1]")."""
    return address.rpartition(":")[0]


def check_bind_host(host: str, credentials: Credentials) -> None:
    """Refuse to listen to other machines without credentials.

    Raises:
        UsageError: `host` is not a loopback address, and the credentials hold on this host only.
    """
    if not (is_loopback(host) or credentials.between_hosts):
        raise UsageError(f"refusing to listen on {host} without credentials: {NEEDED}")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def flow_control(address: str, window: int | None = None) -> list[tuple[str, int]]:
    """Options by which at most so many bytes of a stream are under way, whatever gRPC finds best for it alone.

    Between hosts WINDOW_BYTES at most, so that streams that share a link get equal parts of it: what a server averages
    then comes from all trainers at about the same time. On one host `window`, where one is given.
    """
    if not (address.startswith("unix") or is_loopback(host_of(address))):
        window = min(window or WINDOW_BYTES, WINDOW_BYTES)
    return [] if window is None else [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window)]


def connect(address: str, *, timeout: float, credentials: Credentials | None = None) -> OpenChannel:
    """A channel to `address`, ready for use; retries until somebody listens there or `timeout` seconds passed.

    Args:
        credentials: None: those of this process.

    Raises:
        PeerUnreachable: naming the address and the limit.
        CredentialsRefused: who listens there has other credentials.
        UsageError: another host is meant, and there are no credentials for it; or this process was forked from one that
            has used gRPC.
    """
    credentials = credentials or current()
    if not (address.startswith("unix") or is_loopback(host_of(address)) or credentials.between_hosts):
        raise UsageError(f"refusing to connect to {address} without credentials: {NEEDED}")
    _use_grpc()
    options = [*CHANNEL_OPTIONS, *flow_control(address), *credentials.grpc_channel_options()]
    if credentials.secure:
        channel = grpc.secure_channel(address, credentials.grpc_channel_credentials(), options=options)
    else:
        channel = grpc.insecure_channel(address, options=options)
    try:
        _wait_for_answer(channel, address, timeout, credentials)
    except BaseException:
        channel.close()
        raise
    return OpenChannel(channel)


class OpenChannel:
    """A context manager: gives the channel, and closes it within CLOSE_S, or leaves that to a thread of its own.

    gRPC waits until every call that it cancels has ended, and one whose bytes TCP still holds (the link is cut, or the
    other host takes nothing) ends with its connection only: after a quarter of an hour.

    It is closed on leaving only. A generator would do so when it is dropped, too, as where a forked child ends, in
    which gRPC has no threads.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def __enter__(self) -> grpc.Channel:
        return self.channel

    def __exit__(self, *_: object) -> None:
        closing = threading.Thread(target=self.channel.close, name="gradsync-close-channel", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _wait_for_answer(channel: grpc.Channel, address: str, timeout: float, credentials: Credentials) -> None:
    """
    Raises:
        PeerUnreachable, CredentialsRefused: see `connect`.
    """
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(NO_METHOD)
    deadline, patience = time.monotonic() + timeout, FIRST_LOOK_S
    while True:
        left = deadline - time.monotonic()
        try:  # not grpc.channel_ready_future, after which a channel takes 0.2 s to close
            call(b"", timeout=max(0.0, min(left, patience)), wait_for_ready=True)
        except grpc.RpcError as exc:
            if exc.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                return
            if why := why_refused(
                address, credentials, max(FIRST_LOOK_S, left - patience)
            ):  # gRPC itself only tries again
                raise CredentialsRefused(why) from exc
            if left <= patience:
                raise PeerUnreachable(
                    f"nobody answered at {address} within {timeout:g} s; is it started, and is the address right?"
                ) from exc
        else:
            return
        patience *= 2  # for one who is there, but slow


def _use_grpc() -> None:
    global _used_by
    if _used_by not in (0, os.getpid()):
        raise UsageError(
            f"process {_used_by}, from which this one was forked, has used gRPC, which cannot be used here any more; "
            'start this process by spawn (multiprocessing.get_context("spawn")), or fork before joining'
        )
    _used_by = os.getpid()


def let_go(addresses: Collection[str]) -> None:
    """In a forked child: give up the inherited connections to these servers, which otherwise would not notice that the
    parent died. gRPC cannot be used in this process any more: its threads are the parent's.

    gRPC does not tell its descriptors: they are those of sockets that do not block, with such an address at the other
    end. Each stays taken, by the null device, so that whatever gRPC still does to it in this process does no harm.
    """
    ends = {_end(address) for address in addresses}
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket, or not connected, or that of the listing
            if os.get_blocking(int(name)):
                continue
            connection = socket.socket(fileno=int(name))
            try:
                peer = connection.getpeername()
            finally:
                connection.detach()
            if (peer if isinstance(peer, (str, bytes)) else peer[1]) in ends:
                os.dup2(null, int(name), inheritable=False)
    os.close(null)


def _end(address: str) -> str | bytes | int:
    """What getpeername says of a server's address: a Unix socket's name, or the port."""
    if address.startswith("unix-abstract:"):
        return b"\0" + address.partition(":")[2].encode()
    if address.startswith("unix:"):
        return address.removeprefix("unix:").removeprefix("//")
    return int(address.rpartition(":")[2])


def abort_with(context: grpc.ServicerContext, error: GradSyncError) -> NoReturn:
    """End a call with one of our errors, which `translate` turns back into itself at the caller."""
    context.set_trailing_metadata(((KIND_KEY, type(error).__name__),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    raise AssertionError("context.abort raises")


STATUS_MEANING: dict[grpc.StatusCode, Callable[[str], GradSyncError]] = {
    grpc.StatusCode.CANCELLED: PeerLost,
    grpc.StatusCode.UNKNOWN: PeerError,
    grpc.StatusCode.INVALID_ARGUMENT: ProtocolError,
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerStalled,
    grpc.StatusCode.NOT_FOUND: ProtocolError,
    grpc.StatusCode.ALREADY_EXISTS: ProtocolError,
    grpc.StatusCode.PERMISSION_DENIED: UsageError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ProtocolError,
    grpc.StatusCode.FAILED_PRECONDITION: ProtocolError,
    grpc.StatusCode.ABORTED: PeerLost,
    grpc.StatusCode.OUT_OF_RANGE: ProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
    grpc.StatusCode.INTERNAL: PeerError,
    grpc.StatusCode.UNAVAILABLE: PeerLost,
    grpc.StatusCode.DATA_LOSS: ProtocolError,
    grpc.StatusCode.UNAUTHENTICATED: UsageError,
}


def error_told(error: Any) -> GradSyncError | None:
    """The one that `abort_with` has ended a call with; None: it was ended in another way.

    Args:
        error: a grpc.RpcError that is also a grpc.Call.
    """
    kind = dict(error.trailing_metadata() or ()).get(KIND_KEY)
    return error_from_name(str(kind), error.details()) if kind else None


def translate(error: Any, peer: str, doing: str) -> GradSyncError:
    """The error of ours that a failed gRPC call means.

    Args:
        error: a grpc.RpcError that is also a grpc.Call.
        peer: who was called, as a person knows it ("server 0 at 127.0.0.1:8500").
        doing: what was under way ("pushing step 12").
    """
    if told := error_told(error):
        return told
    code = error.code()
    meaning = STATUS_MEANING[code]
    happened = "was lost" if meaning is PeerLost else "did not answer" if meaning is PeerStalled else "failed"
    return meaning(f"{peer} {happened} while {doing} ({code.name.lower()}: {error.details()})")
