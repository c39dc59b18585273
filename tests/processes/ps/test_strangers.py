"""Members without a seat at a real server's port: many joins, and sessions that say nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import numpy as np
import psutil
import pytest

import ps
from common.credentials.credentials import current
from common.network import rpc
from ps.planes.methods import JOIN, SESSION
from ps.status import ask
from tests.support.channels import ENDS
from tests.support.commands import DEADLINE_S, Started, start_server

pytestmark = pytest.mark.processes

ROUNDS, JOINS, JOIN_BYTES = 10, 40, (4 << 20) - 4096  # so many at a time: gRPC may hold all that nobody has looked at
IDLE = 80  # sessions that say nothing, and joins likewise
MOST_GROWTH = 400 << 20  # it was 1,644 MB when all joins were kept
ANSWER_S = 5.0
TURNED_AWAY = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}  # too long, or others came meanwhile


def silent(until: threading.Event) -> Iterator[bytes]:
    until.wait()
    yield from ()


@pytest.mark.long
def test_strangers_take_neither_memory_nor_threads_nor_the_training(start: Callable[..., Started]) -> None:
    server, address = start_server(start, 1)
    process, over = psutil.Process(server.process.pid), threading.Event()
    with ps.connect([address], 0, 1) as client, ExitStack() as strangers:
        client.register(np.zeros(1000, np.float32))
        before = most = process.memory_info().rss
        strangers.callback(over.set)
        mine, calls = current(), []
        options = [*mine.grpc_channel_options(), ("grpc.use_local_subchannel_pool", 1), ENDS]
        channels = [  # of a channel's streams there are only so many at a time
            strangers.enter_context(grpc.secure_channel(address, mine.grpc_channel_credentials(), options=options))
            for _ in range(4)
        ]
        for channel in channels * (IDLE // 4):
            calls.append(channel.stream_stream(SESSION)(silent(over)))
            calls.append(channel.stream_unary(JOIN).future(silent(over)))
        for _ in range(ROUNDS):
            joins = [channel.unary_unary(JOIN).future(bytes(JOIN_BYTES)) for channel in channels * (JOINS // 4)]
            begin = time.monotonic()
            (reply,) = status_of(address)
            client.push_pull(np.ones(1000, np.float32))
            assert time.monotonic() - begin < ANSWER_S
            assert reply.state == "training"
            assert {join.exception(DEADLINE_S).code() for join in joins} <= TURNED_AWAY
            most = max(most, process.memory_info().rss)
        assert most - before < MOST_GROWTH
        for call in calls:
            call.cancel()
    server.ended_well()


def status_of(address: str) -> list[object]:
    with rpc.connect(address, timeout=ANSWER_S) as channel:
        return list(ask([address], [channel], ANSWER_S))
