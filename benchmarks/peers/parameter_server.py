"""A push-pull round through our parameter servers, by either data plane: every rank pushes its array and gets the mean.

Each size is a training of its own: the server's k-th listens k ports after the first.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from common.addresses import address_after
from common.errors import PeerError
from common.process import prepare_process
from ps.connection import Connection, connect
from ps.servicer import ParameterServer
from ps.shards import parse_shard

__all__ = ["SERVER", "Rank", "main", "means", "uses_ports", "why_absent"]

SERVER = "benchmarks.peers.parameter_server"
uses_ports = True
means = True
TIMEOUT_S = 60.0


def why_absent(name: str) -> str:  # noqa: ARG001 - it is always there
    return ""


class Rank:
    array: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:
        self._data_plane = name.removeprefix("ps-")
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
        self._connection.register(np.zeros(count, np.float32))
        self.array = self._connection.empty(count)

    def all_reduce(self) -> None:
        assert self._connection
        self._connection.push_pull(self.array)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def main() -> int:
    """A server, for one training after the other, until it is ended."""
    prepare_process()
    address, shard, nranks = sys.argv[1:]
    for number in itertools.count():
        with (
            ParameterServer(
                address_after(address, number), int(nranks), shard=parse_shard(shard), timeout=TIMEOUT_S
            ) as server,
            suppress(PeerError),
        ):
            server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
