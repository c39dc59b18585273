"""What an all-reduce can be measured with: ours, the libraries a user would pick instead, and the machine's own limits.

One module a peer, each with a class that has the methods of `Peer`. A peer that cannot run here says why.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy.typing as npt

from common.errors import choose

__all__ = ["BETWEEN_HOSTS", "ON_ONE_HOST", "PEERS", "Peer", "load_peer"]

PEERS = {
    "shm": "benchmarks.peers.gradsync",
    "shm-copied": "benchmarks.peers.gradsync",
    "tcp": "benchmarks.peers.gradsync",
    "ps-shm": "benchmarks.peers.parameter_server",
    "ps-grpc": "benchmarks.peers.parameter_server",
    "tcp-ring": "benchmarks.peers.gradsync",
    "tcp-checksum": "benchmarks.peers.gradsync",
    "gloo": "benchmarks.peers.paddle_gloo",
    "torch-gloo": "benchmarks.peers.torch_gloo",
    "mpi": "benchmarks.peers.mpi",
    "memory-limit": "benchmarks.peers.limits",
    "loopback-limit": "benchmarks.peers.limits",
    "ring-limit": "benchmarks.peers.limits",
    "link": "benchmarks.peers.limits",
}
BETWEEN_HOSTS = ("tcp", "ps-grpc", "gloo", "torch-gloo", "ring-limit")  # and the link itself, always
ON_ONE_HOST = tuple(name for name in PEERS if name not in ("ring-limit", "link"))


class Peer(Protocol):
    """One rank of a group that sums arrays over its ranks."""

    array: npt.NDArray[Any]  # what `all_reduce` works on, in place

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:
        """Join the group; `address` is an abstract socket's name, or, if the module has `uses_ports` or the hosts are
        emulated, a free HOST:PORT on each rank's host (on each server's, if it has a `SERVER`), separated by commas."""

    def resize(self, count: int) -> None:
        """Make `array` hold `count` float32."""

    def all_reduce(self) -> None: ...

    def close(self) -> None: ...


def load_peer(name: str) -> Any:
    """The module of a peer: its `Rank` class (a Peer), `why_absent(name)`, `launch(nranks)`, `sums`, `means`,
    and `SERVER`, the module that is a server: `python -m SERVER ADDRESS I/S NRANKS`.

    Raises:
        UsageError: unknown name.
    """
    return importlib.import_module(PEERS[choose("backend", name, PEERS)])
