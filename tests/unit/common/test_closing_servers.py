"""What becomes of a call that comes in the instant in which its server closes."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import grpc

from common.network import rpc

LIMIT_S, ENDS_S = 20.0, 10.0  # of a call; in which one has to end that a server has not taken


def test_a_call_that_a_closing_server_never_took_ends_at_once() -> None:
    """gRPC would try it again, and three of four such calls then waited without a limit."""
    for _ in range(5):
        call_a_closing_server()


def call_a_closing_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port:
        port.settimeout(LIMIT_S)
        closing = threading.Thread(target=closes_at_the_first_call, args=[port], daemon=True)
        closing.start()
        channel = grpc.insecure_channel(f"127.0.0.1:{port.getsockname()[1]}", options=rpc.CHANNEL_OPTIONS)
        ended: Future[grpc.StatusCode] = Future()
        call = channel.stream_stream("/test.Service/Call")(iter([b"a"]), timeout=LIMIT_S)
        threading.Thread(target=lambda: ended.set_result(end_of(call)), daemon=True).start()
        assert ended.result(ENDS_S) is grpc.StatusCode.UNAVAILABLE
        channel.close()  # only now: it would wait for a call that does not end
        closing.join()


def closes_at_the_first_call(port: socket.socket) -> None:
    """By HTTP/2 (RFC 9113): settings, what acknowledges those of the client, and GOAWAY: it has taken no call."""
    connection, _ = port.accept()
    port.close()
    with connection:
        connection.sendall(frame(4, 0) + frame(4, 1))
        connection.settimeout(LIMIT_S)
        received = b""
        while b"/test.Service/Call" not in received and (more := connection.recv(1 << 12)):
            received += more
        connection.sendall(frame(7, 0, bytes(8)))


def frame(kind: int, flags: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + payload


def end_of(call: Any) -> grpc.StatusCode:
    with suppress(grpc.RpcError):
        list(call)
    return call.code()
