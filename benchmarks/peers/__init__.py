"""What an operation can be measured with: ours, the libraries a user would pick instead, and the machine's own limits.

One module a peer, each with a class that has the methods of `Peer`. A peer that cannot run here says why.

all_reduce    every rank has an array; all are replaced by their sum.
push_pull     one round of a parameter server: every rank pushes its array of gradients, the server makes a step of SGD
              at RATE with their mean, and every rank has the new parameters. Under tcp-sgd
              no server: the ranks all-reduce, and each makes the step.
broadcast     every rank has an array; all are replaced by rank 0's.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy.typing as npt

from common.errors import choose

__all__ = ["OPERATIONS", "OURS", "PEERS", "RATE", "Peer", "is_limit", "load_peer", "possible"]

RATE = 0.5  # a power of two, so that a step with small whole numbers is exact
PEERS = {
    "shm": "benchmarks.peers.gradsync",
    "shm-copied": "benchmarks.peers.gradsync",
    "tcp": "benchmarks.peers.gradsync",
    "tcp-ring": "benchmarks.peers.gradsync",
    "tcp-checksum": "benchmarks.peers.gradsync",
    "gloo": "benchmarks.peers.paddle_gloo",
    "torch-gloo": "benchmarks.peers.torch_gloo",
    "mpi": "benchmarks.peers.mpi",
    "memory-limit": "benchmarks.peers.limits",
    "loopback-limit": "benchmarks.peers.limits",
    "ring-limit": "benchmarks.peers.limits",
    "link": "benchmarks.peers.limits",
    "nccl": "benchmarks.peers.gradsync",
    "nccl-ring": "benchmarks.peers.gradsync",
    "nccl-raw": "benchmarks.peers.nccl_raw",
    "torch-nccl": "benchmarks.peers.torch_nccl",
    "tcp-sgd": "benchmarks.peers.ring_sgd",
    "ps-shm": "benchmarks.peers.parameter_server",
    "ps-shm-copied": "benchmarks.peers.parameter_server",
    "ps-grpc": "benchmarks.peers.parameter_server",
    "ray": "benchmarks.peers.ray_server",
    "torch-rpc": "benchmarks.peers.torch_rpc",
    "round-limit": "benchmarks.peers.limits",
    "memcpy": "benchmarks.peers.limits",
}
_MODULES = tuple(f"benchmarks.peers.{name}" for name in ("gradsync", "parameter_server", "ring_sgd"))
OURS = tuple(name for name, module in PEERS.items() if module in _MODULES)
OF_STEPS = ("ps-shm", "ps-shm-copied", "ps-grpc", "tcp-sgd", "ray", "torch-rpc", "round-limit", "memcpy")
OPERATIONS = {
    "all_reduce": tuple(name for name in PEERS if name not in OF_STEPS),
    "push_pull": OF_STEPS,
    # What else there is for all_reduce does the same as one of these.
    "broadcast": (
        *("shm", "tcp", "tcp-checksum", "gloo", "torch-gloo", "mpi"),
        *("memory-limit", "loopback-limit", "ring-limit"),
    ),
}
# Between emulated hosts; and the link itself, always.
BETWEEN_HOSTS = {
    "all_reduce": ("tcp", "gloo", "torch-gloo", "ring-limit"),
    "push_pull": ("ps-grpc", "tcp-sgd"),
    "broadcast": ("tcp", "gloo", "torch-gloo", "ring-limit"),
}


def possible(operation: str, *, emulated: bool) -> tuple[str, ...]:
    """The backends that can carry out an operation on one host, or between emulated ones."""
    if emulated:
        return BETWEEN_HOSTS[operation]
    return tuple(name for name in OPERATIONS[operation] if name not in ("ring-limit", "link"))


def is_limit(backend: str) -> bool:
    """Whether it computes nothing, and is what the machine allows."""
    return PEERS.get(backend) == "benchmarks.peers.limits"


class Peer(Protocol):
    """One rank of a group. One that works on a GPU has `xp`, the module cupy."""

    array: npt.NDArray[Any]  # what the operation works on, in place, or the gradients; CuPy's if there is `xp`
    parameters: npt.NDArray[Any]  # of push_pull

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:
        """Join the group; `address` is an abstract socket's name, or, if the module has `uses_ports` or the hosts are
        emulated, a free HOST:PORT on each rank's host (on each server's, if it has a `SERVER`), separated by commas."""

    def resize(self, count: int) -> None:
        """Make `array` hold `count` float32."""

    def all_reduce(self) -> None:
        """Block until the sums are there; of push_pull's peers `push_pull`, until the parameters are; of a broadcast's
        `broadcast`, until rank 0's values are there, or on rank 0 until they may be overwritten."""

    def close(self) -> None: ...


def load_peer(name: str) -> Any:
    """The module of a peer: its `Rank` class (a Peer) and `why_absent(name)`; besides, where they are needed:

    launch(nranks): the command that starts all ranks at once, as mpirun.
    sums: False if it computes nothing.
    restless: True if its processes take the cores while they wait, too.
    driven_by_rank_0: True if the other ranks' processes are idle; its `changed()` tells that `array` has new values.
    SERVER: the module that is a server: `python -m SERVER ADDRESS I/S NRANKS MEMORY`, which may write to the file
        MEMORY what it uses after its imports (common/system/process_memory.py).

    Raises:
        UsageError: unknown name.
    """
    return importlib.import_module(PEERS[choose("backend", name, PEERS)])
