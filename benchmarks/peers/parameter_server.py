"""A push-pull round through our parameter servers: every rank pushes its array and gets the mean of all.

Each size is a training of its own: the server's k-th listens k ports after the first.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import suppress
from typing import Any

import numpy.typing as npt

from common.addresses import address_after
from common.arena import Arena, Layout
from common.errors import PeerError
from common.process import prepare_process
from ps.client import Client
from ps.servicer import ParameterServer
from ps.shards import parse_shard

__all__ = ["SERVER", "Rank", "main", "means", "uses_ports", "why_absent"]

SERVER = "benchmarks.peers.parameter_server"
uses_ports = True
means = True
TENSOR = 1 << 20  # elements: as the array were the gradients of layers of 4 MiB
TIMEOUT_S = 60.0


def why_absent(name: str) -> str:  # noqa: ARG001 - it is always there
    return ""


class Rank:
    array: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:  # noqa: ARG002
        self._rank, self._nranks, self._servers = rank, nranks, address.split(",")
        self._client: Client | None = None
        self._trainings = itertools.count()

    def resize(self, count: int) -> None:
        self.close()
        number = next(self._trainings)
        addresses = [address_after(server, number) for server in self._servers]
        self._client = Client(addresses, self._rank, self._nranks, timeout=TIMEOUT_S)
        layout = Layout.of((f"{first}", (min(TENSOR, count - first),)) for first in range(0, count, TENSOR))
        self._arena = Arena(layout)
        self._client.register(self._arena, None)
        self.array = self._arena.gradients[:count]

    def all_reduce(self) -> None:
        assert self._client
        for bucket in range(len(self._arena.buckets)):
            self._client.push(bucket)
        self._client.average()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


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
