"""Jobs of trainers and servers in one process, a synchronizer for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import pytest

from common.tensors.arena import Arena, Layout
from common.tensors.buckets import plan_buckets
from ps.client.client import Client
from ps.coordinator.servicer import ParameterServer
from ps.store.modes import SYNC, Mode
from ps.synchronizer import ServerSynchronizer, synchronizer_for
from tests.support.credentials import encrypted
from tests.support.groups import sample
from tests.support.synchronizer_contract import Make
from tests.support.thorough import and_long

__all__ = ["BETWEEN", "ENCRYPTED", "EVERYWHERE", "everywhere", "job", "make_arena"]
SHAPES = [("a", (7, 11)), ("b", (33,)), ("c", (5, 3, 3))]


@contextmanager
def serving(nranks: int, servers: int) -> Iterator[list[str]]:
    with ExitStack() as stack:
        opened = [ParameterServer("127.0.0.1:0", nranks, shard=(index, servers)) for index in range(servers)]
        for server in opened:
            stack.enter_context(server)
        yield [server.address for server in opened]


BETWEEN = [(2, 1, "grpc"), (2, 1, "tcp"), (2, 2, "shm"), (3, 1, "mixed"), (3, 2, "grpc"), (3, 2, "tcp"), (3, 2, "shm")]
ENCRYPTED = [(3, 2, "tls")]  # tcp, over TLS
EVERYWHERE = [(1, 1, "grpc"), (1, 2, "tcp"), (1, 1, "shm"), *BETWEEN]
everywhere = pytest.mark.parametrize(("nranks", "servers", "plane"), and_long(EVERYWHERE, ENCRYPTED))


@contextmanager
def job(nranks: int, servers: int, plane: str, *, overlap: bool = True, mode: Mode = SYNC) -> Iterator[Make]:
    """Data plane "mixed": each rank has another one."""
    of_rank = {"mixed": ("shm", "grpc", "tcp", "shm"), "tls": ("tcp",) * nranks}.get(plane, (plane,) * nranks)

    def make(rank: int, nranks: int) -> ServerSynchronizer:
        client = Client(addresses, rank, nranks, data_plane=of_rank[rank], mode=mode)
        return synchronizer_for(client, overlap=overlap)

    with encrypted() if plane == "tls" else nullcontext(), serving(nranks, servers) as addresses:
        yield make


def make_arena(rank: int) -> Arena:
    layout = Layout.of(SHAPES)
    arena = Arena(
        layout, buckets=plan_buckets([s.start for s in layout.slots], layout.length, first_bytes=64, bucket_bytes=256)
    )
    for slot in layout.slots:
        arena.parameter(slot)[...] = sample(rank, slot.shape, "float32", seed=77)
    return arena
