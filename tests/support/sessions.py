"""Servers and trainers over real gRPC in one process, and what NumPy makes of their steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import grpc
import numpy as np
import pytest

from common.errors import GradSyncError
from common.network import rpc
from common.network.gradsync_pb2 import Chunk, JoinReply, JoinRequest, ServerMessage, TrainerMessage
from common.system.memory import aligned_empty
from common.tensors.arena import Arena, FloatArray, Layout
from common.tensors.buckets import plan_buckets
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.coordinator.servicer import ParameterServer
from ps.planes.methods import SERVICE, SESSION
from ps.planes.wire_format import read_server, read_trainer
from tests.support.channels import member_channel
from tests.support.groups import outcomes_of, reduced, sample
from tests.support.thorough import LONG

__all__ = [
    "DEADLINE_S",
    "RATE",
    "addresses",
    "as_trainer",
    "assert_all",
    "errors_of",
    "expected_after",
    "failure_of",
    "lying",
    "make_arena",
    "outcomes_within",
    "parameters",
    "planes",
    "planes_with",
    "raw_session",
    "serving",
    "take_step",
]

DEADLINE_S = 20.0
SHAPES = [("a.weight", (7, 9)), ("a.bias", (9,)), ("b.weight", (9, 33)), ("b.bias", (1,))]
RATE = 0.05


@contextmanager
def serving(nranks: int, servers: int = 1, *, timeout: float = 30.0) -> Iterator[list[ParameterServer]]:
    """Whose trainers, which are threads and so always live, wait for one another no longer than `timeout`."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                ParameterServer("127.0.0.1:0", nranks, shard=(index, servers), timeout=timeout, wait_limit=0.0),
            )
            for index in range(servers)
        ]


def addresses(servers: Sequence[ParameterServer]) -> list[str]:
    return [server.address for server in servers]


def make_arena(
    rank: int,
    shapes: Sequence[tuple[str, tuple[int, ...]]] = SHAPES,
    *,
    bucket_bytes: int = 512,
    empty: Callable[[int], Any] = aligned_empty,
) -> Arena:
    """Parameters differ by rank, so that it shows whose win."""
    layout = Layout.of(shapes)
    starts = [slot.start for slot in layout.slots]
    buckets = plan_buckets(starts, layout.length, first_bytes=64, bucket_bytes=bucket_bytes)
    arena = Arena(layout, buckets=buckets, empty=empty)
    arena.parameters[...] = sample(rank, layout.length, "float32", seed=99)
    return arena


def take_step(client: Client, arena: Arena, *, rate: float = RATE, pushed: int = 0) -> None:
    """Args: pushed: how many buckets have been, of the same gradients."""
    arena.gradients[...] = sample(client.rank, arena.layout.length, "float32", seed=client.step)
    for bucket in range(pushed, len(arena.buckets)):
        client.push(bucket)
    client.commit(rate)


def expected_after(steps: int, nranks: int, arena: Arena) -> FloatArray:
    length = arena.layout.length
    parameters = sample(0, length, "float32", seed=99)
    for step in range(steps):
        gradients = [sample(rank, length, "float32", seed=step) for rank in range(nranks)]
        for b in arena.buckets:
            mean = reduced([g[b.start : b.stop] for g in gradients], "mean")
            parameters[b.start : b.stop] -= np.float32(RATE) * mean
    return parameters


def as_trainer(
    servers: Sequence[str],
    rank: int,
    nranks: int,
    body: Callable[[Client, Arena], Any],
    *,
    arena_of: Callable[[int], Arena] = make_arena,
    **options: Any,
) -> Any:
    """Join, register, call `body`, and leave; after an error with the reason, as training does."""
    client, arena = Client(servers, rank, nranks, **options), arena_of(rank)
    try:
        client.register(arena, SGD())
        result = body(client, arena)
    except BaseException as exc:
        client.close(f"{type(exc).__name__}: {exc}")
        raise
    client.close()
    return result


def errors_of(nranks: int, body: Callable[[int], object]) -> list[BaseException | None]:
    return [outcome.error for outcome in outcomes_of(nranks, body)]


def failure_of(server: ParameterServer) -> GradSyncError:
    with pytest.raises(GradSyncError) as caught:
        server.wait()
    return caught.value


def assert_all(errors: Sequence[BaseException | None], kind: type[GradSyncError], text: str) -> None:
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    assert all(text in str(error) for error in errors), errors


PLANES: dict[str, list[tuple[str, bool]]] = {  # each rank's data plane, and whether its arrays are from `empty`
    "grpc": [("grpc", False)] * 3,
    "tcp": [("tcp", False)] * 3,
    "shm": [("shm", True)] * 3,
    "shm, ordinary arrays": [("shm", False)] * 3,
    "shm, rank 0's arrays ordinary": [("auto", False), ("auto", True), ("auto", True)],
    "rank 0 over grpc": [("grpc", False), ("shm", True), ("shm", False)],
    "rank 0 over tcp": [("tcp", True), ("shm", True), ("grpc", False)],
    "rank 1 over grpc": [("auto", True), ("grpc", True), ("auto", True)],
}
planes = pytest.mark.parametrize("planes", PLANES.values(), ids=PLANES)


def planes_with(names: str, *parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by planes and these: each plane with some of them, in `make test-long` with all."""
    rows = list(product(*parameters))
    turns = -(-len(rows) // len(PLANES)) * len(PLANES)
    few = {([*PLANES][turn % len(PLANES)], rows[turn % len(rows)]) for turn in range(turns)}
    chosen = [
        pytest.param(*row, PLANES[plane], id=f"{plane}-{'-'.join(map(str, row))}", marks=mark)
        for plane, row in product(PLANES, rows)
        for mark in ([()] if (plane, row) in few else [pytest.mark.long] if LONG else [])
    ]
    return pytest.mark.parametrize(f"{names}, planes", chosen)


def outcomes_within(seconds: float, function: Callable[[], object]) -> list[BaseException]:
    """What `function` raised on a thread by then."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(seconds)
    return list(raised)


@contextmanager
def raw_session(address: str, messages: Iterator[TrainerMessage]) -> Iterator[Any]:
    """A session of somebody who is not one of our clients."""
    options = [("grpc.max_send_message_length", -1)]
    with member_channel(address, options) as channel:
        call = channel.stream_stream(
            SESSION,
            request_serializer=TrainerMessage.SerializeToString,
            response_deserializer=lambda data: read_server(data).message,
        )(messages)
        yield call
        call.cancel()


@contextmanager
def lying(
    answers: Iterable[ServerMessage] | Callable[..., Iterable[ServerMessage]], *, desk: str = ""
) -> Iterator[str]:
    """The address of a server that says `answers`, or what they are to all else that it hears, once it has heard who is
    there and what it registers, whatever that is, then ends the stream."""

    def session(messages: Iterator[TrainerMessage], context: grpc.ServicerContext) -> Iterator[ServerMessage]:
        next(messages), next(messages)
        yield from answers(messages) if callable(answers) else answers

    handlers = {
        "Join": grpc.unary_unary_rpc_method_handler(
            lambda request, context: JoinReply(shard=0, shards=1, desk=desk),
            JoinRequest.FromString,
            JoinReply.SerializeToString,
        ),
        "Session": grpc.stream_stream_rpc_method_handler(
            session, lambda data: read_trainer(data).message, ServerMessage.SerializeToString
        ),
    }
    server, address = rpc.serve("127.0.0.1:0", SERVICE, handlers, threads=4)
    try:
        yield address
    finally:
        server.stop(0).wait()


def parameters(start: int, size: int, *, step: int = 0) -> ServerMessage:
    return ServerMessage(parameters=Chunk(step=step, start=start, data=bytes(4 * size)))
