"""Rounds of our parameter servers: ps-shm (arrays made by the connection, ps-shm-copied: ordinary ones), ps-tcp,
ps-grpc, and these two over TLS: ps-tcp-tls and ps-grpc-tls.

Each size is a training of its own: the server's k-th listens k ports after the first.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy.typing as npt

from benchmarks.contestants.encryption import encrypt_if_secure
from benchmarks.contestants.table_of_sweeps import RATE
from common.errors import PeerError
from common.system.addresses import address_after
from common.system.memory import aligned_empty, give_memory_back
from common.system.process_memory import leave_memory
from common.tensors.optimizers import SGD
from ps.connection import Connection, connect
from ps.coordinator.servicer import ParameterServer
from ps.server import prepare_server
from ps.store.shards import parse_shard

__all__ = ["SERVER", "Rank", "main", "uses_ports", "why_absent"]

SERVER = "benchmarks.contestants.parameter_server"
uses_ports = True
TIMEOUT_S = 60.0


def why_absent(name: str) -> str:  # noqa: ARG001 - it is always there
    return ""


class Rank:
    array: npt.NDArray[Any]
    parameters: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:
        encrypt_if_secure()
        self._data_plane, self._ordinary = name.split("-")[1], name.endswith("-copied")
        self._rank, self._nranks, self._servers = rank, nranks, address.split(",")
        self._connection: Connection | None = None
        self._trainings = itertools.count()

    def resize(self, count: int) -> None:
        self.close()
        number = next(self._trainings)
        self._connection = connect(
            servers=[address_after(server, number) for server in self._servers],
            rank=self._rank,
            nranks=self._nranks,
            data_plane=self._data_plane,
            timeout=TIMEOUT_S,
        )
        make = aligned_empty if self._ordinary else self._connection.empty
        self.parameters, self.array = make(count), make(count)
        self.parameters.fill(0)
        self._connection.register(self.parameters, SGD(learning_rate=RATE))

    def push_pull(self) -> None:
        assert self._connection
        self._connection.push_pull(self.array)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def main() -> int:
    """A server, for one training after the other, until it is ended."""
    prepare_server()
    encrypt_if_secure()
    import common.tensors.flat_optimizer  # noqa: F401 - now, so that no trainer waits for it

    address, shard, nranks, memory = sys.argv[1:]
    leave_memory(Path(memory))
    for number in itertools.count():
        serve(address_after(address, number), shard, int(nranks))
        give_memory_back()
    return 0


def serve(address: str, shard: str, nranks: int) -> None:
    """One training, however it ends."""
    with ParameterServer(address, nranks, shard=parse_shard(shard), timeout=TIMEOUT_S) as server, suppress(PeerError):
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
