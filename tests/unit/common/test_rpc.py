"""gRPC servers and channels: typed errors cross the wire, every status has a meaning, and limits hold."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import create_autospec

import grpc
import pytest

from common import errors
from common.credentials.credentials import find
from common.errors import (
    GradSyncError,
    PeerError,
    PeerLost,
    PeerStalled,
    PeerUnreachable,
    PortInUse,
    ProtocolError,
    UsageError,
)
from common.launch.ranks import abstract_address
from common.network import rpc
from common.system.process import JOB_SECRET_VARIABLE
from tests.support.channels import INSECURE, OTHERS, member_channel

Handler = Callable[[bytes, grpc.ServicerContext], bytes]
LIMIT_S = 20.0  # of calls that are expected to be answered
TYPES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GradSyncError)]
MEANING = {
    "CANCELLED": PeerLost,
    "UNKNOWN": PeerError,
    "INVALID_ARGUMENT": ProtocolError,
    "DEADLINE_EXCEEDED": PeerStalled,
    "NOT_FOUND": ProtocolError,
    "ALREADY_EXISTS": ProtocolError,
    "PERMISSION_DENIED": UsageError,
    "RESOURCE_EXHAUSTED": ProtocolError,
    "FAILED_PRECONDITION": ProtocolError,
    "ABORTED": PeerLost,
    "OUT_OF_RANGE": ProtocolError,
    "UNIMPLEMENTED": ProtocolError,
    "INTERNAL": PeerError,
    "UNAVAILABLE": PeerLost,
    "DATA_LOSS": ProtocolError,
    "UNAUTHENTICATED": UsageError,
}


@contextmanager
def serving(handler: Handler, address: str | None = None) -> Iterator[str]:
    """A server whose one method, /test.Service/Call, is `handler` on bytes; gives its address."""
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(handler)}
    server, where = rpc.serve(address or abstract_address("rpc"), "test.Service", handlers, threads=2)
    try:
        yield where
    finally:
        rpc.stop(server, 0)


def call(address: str, request: bytes = b"", *, timeout: float = LIMIT_S, method: str = "Call") -> bytes:
    """Call the method; what fails is translated."""
    with rpc.connect(address, timeout=LIMIT_S) as channel:
        return call_over(channel, request, timeout=timeout, method=method)


def call_over(channel: Any, request: bytes, *, timeout: float = LIMIT_S, method: str = "Call") -> bytes:
    try:
        return channel.unary_unary(f"/test.Service/{method}")(request, timeout=timeout)
    except grpc.RpcError as exc:
        raise rpc.translate(exc, "server 7 at X", "pushing step 12") from exc


def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
    return request


def raising(error: GradSyncError) -> Handler:
    def handler(request: bytes, context: grpc.ServicerContext) -> bytes:
        rpc.abort_with(context, error)

    return handler


@pytest.mark.parametrize("status", [s for s in grpc.StatusCode if s is not grpc.StatusCode.OK], ids=lambda s: s.name)
def test_every_status_is_translated(status: grpc.StatusCode) -> None:
    def handler(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(status, "the details")
        raise AssertionError

    with serving(handler) as address, pytest.raises(GradSyncError) as caught:
        call(address)
    assert type(caught.value) is MEANING[status.name]
    happened = {PeerLost: "was lost", PeerStalled: "did not answer"}.get(type(caught.value), "failed")
    name = status.name.lower()
    assert str(caught.value) == f"server 7 at X {happened} while pushing step 12 ({name}: the details)"
    assert isinstance(caught.value.__cause__, grpc.RpcError)


def test_the_table_of_statuses_is_complete() -> None:
    assert {s.name for s in grpc.StatusCode} - {"OK"} == set(MEANING)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_a_typed_error_arrives_as_itself(kind: type[GradSyncError]) -> None:
    text = f"{kind.__name__}: rank 3 sent 5 elements, expected 7 (é, 中, 100 %)\nsecond line"
    with serving(raising(kind(text))) as address, pytest.raises(GradSyncError) as caught:
        call(address)
    assert type(caught.value) is kind
    assert str(caught.value) == text


def test_an_error_of_an_unknown_name_keeps_its_text() -> None:
    class NewerError(GradSyncError):
        pass

    with serving(raising(NewerError("why"))) as address, pytest.raises(GradSyncError) as caught:
        call(address)
    assert type(caught.value) is GradSyncError
    assert str(caught.value) == "NewerError: why"


def test_a_bug_in_a_handler_is_a_peer_error_with_its_text(caplog: pytest.LogCaptureFixture) -> None:
    def handler(request: bytes, context: grpc.ServicerContext) -> bytes:
        raise ZeroDivisionError("by zero")

    with serving(handler) as address, pytest.raises(PeerError, match=r"server 7 at X failed .*unknown.*by zero"):
        call(address)


def test_a_method_that_does_not_exist_is_a_protocol_error() -> None:
    with serving(echo) as address, pytest.raises(ProtocolError, match="unimplemented"):
        call(address, method="Other")


def test_a_handler_that_does_not_answer_has_stalled() -> None:
    let_go = threading.Event()

    def handler(request: bytes, context: grpc.ServicerContext) -> bytes:
        let_go.wait(LIMIT_S)
        return b""

    with serving(handler) as address:
        begin = time.monotonic()
        with pytest.raises(PeerStalled, match="server 7 at X did not answer while pushing step 12"):
            call(address, timeout=0.1)
        assert 0.1 <= time.monotonic() - begin < LIMIT_S / 2
        let_go.set()


def test_a_server_that_stops_during_a_call_is_lost() -> None:
    entered, let_go = threading.Event(), threading.Event()

    def handler(request: bytes, context: grpc.ServicerContext) -> bytes:
        entered.set()
        let_go.wait(LIMIT_S)
        return b""

    handlers = {"Call": grpc.unary_unary_rpc_method_handler(handler)}
    server, address = rpc.serve("127.0.0.1:0", "test.Service", handlers, threads=1)

    def stop() -> None:
        entered.wait(LIMIT_S)
        server.stop(0)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(PeerLost, match="server 7 at X was lost while pushing step 12"):
        call(address)
    let_go.set()
    stopper.join()


def test_a_free_port_is_chosen_and_told() -> None:
    with serving(echo, "127.0.0.1:0") as address:
        host, port = address.split(":")
        assert host == "127.0.0.1"
        assert 0 < int(port) < 65536
        assert call(address, b"hello") == b"hello"


def test_a_unix_address_stays_as_it_is() -> None:
    mine = abstract_address("rpc")
    with serving(echo, mine) as address:
        assert address == mine
        assert call(address, b"hello") == b"hello"


def test_a_port_in_use_is_named() -> None:
    with serving(echo, "127.0.0.1:0") as address:
        with pytest.raises(PortInUse, match=f"cannot listen on {address}: the port is in use"), serving(echo, address):
            pytest.fail("two servers share a port")
        assert call(address, b"still there") == b"still there"


def test_a_port_can_be_used_again_after_the_server_stopped() -> None:
    with serving(echo, "127.0.0.1:0") as address:
        call(address)
    with serving(echo, address) as again:
        assert call(again, b"x") == b"x"


def test_nobody_at_an_address_is_unreachable_within_the_limit() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening, and nobody else can
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        begin = time.monotonic()
        with (
            pytest.raises(PeerUnreachable, match=rf"nobody answered at {address} within 0\.2 s"),
            rpc.connect(address, timeout=0.2),
        ):
            pass
        assert 0.2 <= time.monotonic() - begin < 5


def test_connect_waits_for_a_server_that_starts_later() -> None:
    address = abstract_address("rpc")
    got: list[bytes] = []
    caller = threading.Thread(target=lambda: got.append(call(address, b"early")))
    caller.start()
    with serving(echo, address):
        caller.join()
    assert got == [b"early"]


def test_a_channel_closes_at_once() -> None:
    took = []
    with serving(echo) as address:
        for _ in range(5):
            with rpc.connect(address, timeout=LIMIT_S):
                begin = time.monotonic()
            took.append(time.monotonic() - begin)
    assert min(took) < 0.1  # gRPC's own wait for a server makes it 0.2 s


def test_a_channel_that_does_not_close_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC waits for its calls' bytes, which nobody takes where a link is cut."""
    taken = threading.Event()
    with serving(echo) as address, rpc.connect(address, timeout=LIMIT_S) as channel:
        close = channel.close

        def close_late() -> None:
            taken.wait(LIMIT_S)
            close()

        monkeypatch.setattr(channel, "close", close_late)
        begin = time.monotonic()
    assert rpc.CLOSE_S <= time.monotonic() - begin < LIMIT_S / 2
    taken.set()
    next(each for each in threading.enumerate() if each.name == "gradsync-close-channel").join()


def test_a_server_that_does_not_stop_is_left() -> None:
    server = create_autospec(grpc.Server)
    server.stop.return_value = threading.Event()  # never set
    begin = time.monotonic()
    rpc.stop(server, 0.1)
    assert rpc.CLOSE_S + 0.1 <= time.monotonic() - begin < LIMIT_S / 2
    server.stop.assert_called_once_with(0.1)


def test_the_largest_message_passes() -> None:
    largest = bytes(4 * rpc.CHUNK_BYTES)
    with serving(echo) as address:
        assert call(address, largest) == largest


def test_a_larger_message_is_refused_by_its_sender() -> None:
    with serving(echo) as address, pytest.raises(ProtocolError, match=r"resource_exhausted: .*larger than max"):
        call(address, bytes(4 * rpc.CHUNK_BYTES + 1))


def test_a_larger_message_is_refused_by_its_receiver() -> None:
    seen: list[int] = []

    def handler(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(len(request))
        return b""

    with serving(handler) as address, member_channel(address) as channel:  # a peer without our limit
        with pytest.raises(ProtocolError, match=r"resource_exhausted: .*larger than max"):
            call_over(channel, bytes(4 * rpc.CHUNK_BYTES + 1))
        assert seen == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_permission(host: str) -> None:
    rpc.check_bind_host(host, find())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.1.2.3", "192.168.0.1", "node1", "", "localhost.org"])
def test_other_hosts_need_credentials_that_they_can_have_too(host: str) -> None:
    for credentials in (find(environment={}), find(environment={JOB_SECRET_VARIABLE: "1f" * 32})):
        with pytest.raises(UsageError, match=r"refusing to listen on .* without credentials: .*token FILE.*--insecure"):
            rpc.check_bind_host(host, credentials)
    for credentials in (OTHERS, INSECURE):
        rpc.check_bind_host(host, credentials)


@pytest.mark.parametrize(
    ("address", "host"), [("127.0.0.1:80", "127.0.0.1"), ("[::1]:80", "[::1]"), ("node1:8500", "node1"), (":80", "")]
)
def test_host_of(address: str, host: str) -> None:
    assert rpc.host_of(address) == host


def test_a_sender_waits_where_the_window_ends(wait_until: Callable[[Callable[[], object]], None]) -> None:
    piece, sent, go = bytes(1 << 16), [], threading.Event()

    def take(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        assert go.wait(LIMIT_S)
        yield str(sum(map(len, requests))).encode()

    def pieces() -> Iterator[bytes]:
        for number in range(64):
            sent.append(number)
            yield piece

    handlers = {"Call": grpc.stream_stream_rpc_method_handler(take)}
    server, where = rpc.serve(abstract_address("rpc"), "test.Service", handlers, threads=2, window=16 * len(piece))
    try:
        with rpc.connect(where, timeout=LIMIT_S) as channel:
            answers = channel.stream_stream("/test.Service/Call")(pieces(), timeout=LIMIT_S)
            wait_until(lambda: len(sent) >= 16)
            before = len(sent)
            go.set()
            assert next(answers) == b"%d" % (64 * len(piece))
    finally:
        go.set()
        server.stop(0).wait()
    assert before < 24


@pytest.mark.parametrize(
    ("address", "windows"),
    [
        ("127.0.0.1:8500", []),
        ("[::1]:8500", []),
        ("localhost:0", []),
        ("unix-abstract:gradsync", []),
        ("10.0.0.1:8500", [rpc.WINDOW_BYTES]),
        ("0.0.0.0:0", [rpc.WINDOW_BYTES]),
        ("server.example:8500", [rpc.WINDOW_BYTES]),
    ],
)
def test_between_hosts_a_stream_has_no_more_than_its_window_under_way(address: str, windows: list[int]) -> None:
    options = rpc.flow_control(address)
    assert [value for key, value in options if key == "grpc.http2.lookahead_bytes"] == windows
    assert [value for key, value in options if key == "grpc.http2.bdp_probe"] == [0 for _ in windows]


@pytest.mark.parametrize(
    ("address", "window", "bytes_under_way"), [("127.0.0.1:0", 1 << 23, 1 << 23), ("10.0.0.1:0", 1 << 23, 1 << 20)]
)
def test_the_smaller_window_counts(address: str, window: int, bytes_under_way: int) -> None:
    assert ("grpc.http2.lookahead_bytes", bytes_under_way) in rpc.flow_control(address, window)
