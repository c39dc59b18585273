"""What an all-reduce can be measured with: ours, the libraries a user would pick instead, and the machine's own limits.

One module a peer, each with a class that has the methods of `Peer`. A peer that cannot run here says why.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy.typing as npt

from common.errors import choose

__all__ = ["PEERS", "Peer", "load_peer"]

PEERS = {
    "shm": "benchmarks.peers.gradsync",
    "shm-copied": "benchmarks.peers.gradsync",
    "tcp": "benchmarks.peers.gradsync",
    "gloo": "benchmarks.peers.paddle_gloo",
    "torch-gloo": "benchmarks.peers.torch_gloo",
    "mpi": "benchmarks.peers.mpi",
    "memory-limit": "benchmarks.peers.limits",
    "loopback-limit": "benchmarks.peers.limits",
    "nccl": "benchmarks.peers.gradsync",
    "nccl-ring": "benchmarks.peers.gradsync",
    "nccl-raw": "benchmarks.peers.nccl_raw",
    "torch-nccl": "benchmarks.peers.torch_nccl",
}


class Peer(Protocol):
    """One rank of a group that sums arrays over its ranks. One that works on a GPU has `xp`, the module cupy."""

    array: npt.NDArray[Any]  # what `all_reduce` works on, in place; CuPy's if there is `xp`

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:
        """Join the group; `address` is an abstract socket's name or a HOST:PORT, as `uses_port` says."""

    def resize(self, count: int) -> None:
        """Make `array` hold `count` float32."""

    def all_reduce(self) -> None:
        """Block until the sums are there."""

    def close(self) -> None: ...


def load_peer(name: str) -> Any:
    """The module of a peer: its `Rank` class (a Peer), `why_absent(name)`, `launch(nranks)` and `sums`.

    Raises:
        UsageError: unknown name.
    """
    return importlib.import_module(PEERS[choose("backend", name, PEERS)])
