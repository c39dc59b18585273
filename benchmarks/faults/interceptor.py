"""What a network that keeps to no promise does to one message: an interceptor within a process, of whatever is sent.

    python -m benchmarks.faults.interceptor KIND FATE NUMBER MODULE ARGS...

runs a command of ours in which the NUMBERth message of that kind, counted from 1, meets its fate. KIND is a field of
TrainerMessage; `server's` and a field of ServerMessage; a call of a ring over TCP, of which a frame is meant; or an
RPC, as Join.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import grpc

from collective.call_tags import CALLS, OPERATIONS, Tag
from collective.transports.tcp import TcpTransport
from common.network import rpc
from common.network.gradsync_pb2 import Chunk, ServerMessage, TrainerMessage
from ps.planes.data_connection import DataConnection
from ps.planes.mailboxes import Mailbox
from ps.planes.send_queue import SendQueue
from ps.planes.wire_format import Outgoing

__all__ = ["FATES", "RPC_FATES", "STRUCK", "Interception", "Interceptor", "main"]

FATES = ("lost", "doubled", "overtaken", "delayed", "of an old epoch")
RPC_FATES = ("lost", "answer lost", "doubled", "delayed", "of an old epoch")
DELAY_S = 0.3
STRUCK = "intercepted: "
OUTGOING = {2: "parameters", 3: "gradients", 1: "server's parameters"}  # of Outgoing, by its field


@dataclass(frozen=True)
class Interception:
    """See `Interceptor`.

    Args:
        who: sends the message: the rank; -1: the server.
    """

    kind: str
    fate: str
    number: int
    who: int


class Interceptor:
    """A context manager: while it is entered, all that this process sends goes through it.

    Attributes:
        struck: whether there was such a message.
    """

    def __init__(self, kind: str, fate: str, number: int = 1) -> None:
        self.kind, self.fate, self._number = kind, fate, number
        self.struck = False
        self._count = 0
        self._held: dict[object, Any] = {}  # what is overtaken, by where it goes
        self._lock = threading.Lock()

    def __enter__(self) -> Interceptor:
        self._patches = ExitStack()
        put, data_put, note, send, connect = (
            SendQueue.put,
            DataConnection.put,
            Mailbox.put,
            TcpTransport.send,
            rpc.connect,
        )

        def put_queue(queue: SendQueue[Any], messages: Iterable[Any]) -> None:
            put(queue, self._each(queue, messages))

        def put_data(connection: DataConnection, messages: Iterable[Any], *, at_once: bool = False) -> None:
            data_put(connection, self._each(connection, messages), at_once=at_once)

        def put_note(box: Mailbox, data: bytes) -> bool:
            kind = TrainerMessage if box._bell else ServerMessage
            message = kind.FromString(data)
            return all(note(box, each.SerializeToString()) for each in self._of(box, named(message), message, older))

        def send_frame(transport: TcpTransport, rank: int, array: Any, tag: Tag) -> None:
            frame = (array.copy(), tag)
            call = CALLS[tag.phase % OPERATIONS]
            for data, label in self._of((transport, rank), call, frame, lambda each: (each[0], older_tag(each[1]))):
                send(transport, rank, data, label)

        def connect_through(*args: Any, **options: Any) -> rpc.OpenChannel:
            return rpc.OpenChannel(grpc.intercept_channel(connect(*args, **options).channel, _Calls(self)))

        for owner, name, other in (
            (SendQueue, "put", put_queue),
            (DataConnection, "put", put_data),
            (Mailbox, "put", put_note),
            (TcpTransport, "send", send_frame),
            (rpc, "connect", connect_through),
        ):
            self._patches.enter_context(patch.object(owner, name, other))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def is_it(self, kind: str) -> bool:
        """Whether this message of that kind is the one."""
        with self._lock:
            if kind != self.kind:
                return False
            self._count += 1
            if self._count != self._number:
                return False
            self.struck = True
        print(f"{STRUCK}{self.kind} {self.fate}", file=sys.stderr, flush=True)
        return True

    def _each(self, where: object, messages: Iterable[Any]) -> Iterator[Any]:
        for message in messages:
            yield from self._of(where, named(message), message, older)

    def _of(self, where: object, kind: str, message: Any, make_older: Callable[[Any], Any]) -> list[Any]:
        """What is sent there instead of it."""
        held = [self._held.pop(where)] if where in self._held else []
        if not self.is_it(kind):
            return [message, *held]
        if self.fate == "overtaken":
            self._held[where] = message
        if self.fate == "delayed":
            time.sleep(DELAY_S)
        fates = {"lost": 0, "overtaken": 0, "doubled": 2}
        sent = make_older(message) if self.fate == "of an old epoch" else message
        return [sent] * fates.get(self.fate, 1)


def named(message: Any) -> str:
    """Its kind."""
    if isinstance(message, Outgoing):
        return OUTGOING[message.field]
    kind = str(message.WhichOneof("kind"))
    return kind if isinstance(message, TrainerMessage) else f"server's {kind}"


def older(message: Any) -> Any:
    if isinstance(message, Outgoing):
        chunk = Chunk()
        chunk.CopyFrom(message.chunk)
        chunk.epoch -= 1
        return replace(message, chunk=chunk)
    copied = type(message)()
    copied.CopyFrom(message)
    getattr(copied, copied.WhichOneof("kind")).epoch -= 1
    return copied


def older_tag(tag: Tag) -> Tag:
    return tag._replace(epoch=tag.epoch - 1)


class NoAnswer(grpc.RpcError):
    """A call that nobody answers until its time is over; also what that raises."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def result(self) -> object:
        time.sleep(self._seconds)
        raise self

    def __next__(self) -> object:
        return self.result()

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "intercepted"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class _Calls(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor

    def intercept_unary_stream(self, call: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        interceptor = self._interceptor
        if not interceptor.is_it(details.method.rpartition("/")[2]):
            return call(details, request)
        fate = interceptor.fate
        if fate == "delayed":
            time.sleep(DELAY_S)
        if fate == "of an old epoch":
            request.epoch -= 1
        if fate == "doubled":
            self._again = call(details, request)  # which ends with it
        if fate == "answer lost":
            self._unheard = call(details, request)
        return NoAnswer(details.timeout) if "lost" in fate else call(details, request)

    def intercept_unary_unary(self, call: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return self.intercept_unary_stream(call, details, request)


def main(arguments: list[str]) -> None:
    kind, fate, number, module, *rest = arguments
    sys.argv = [module, *rest]
    with Interceptor(kind, fate, int(number)):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
