"""Who takes part in a sweep: what carries out single operations.

A new one is a line in the TABLE below and a module in this folder, with a class that has the methods of `Member`; one
that cannot run here says why.

all_reduce    every rank has an array; all are replaced by their sum.
push_pull     one round of a parameter server: every rank pushes its array of gradients, the server makes a step of SGD
              at RATE with their mean, and every rank has the new parameters. Under tcp-sgd
              no server: the ranks all-reduce, and each makes the step.
broadcast     every rank has an array; all are replaced by rank 0's.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from common.errors import choose

__all__ = ["BACKENDS", "OPERATIONS", "OURS", "RATE", "Member", "is_encrypted", "is_limit", "load_backend", "over_tls"]
__all__ += ["plain_of", "possible"]

RATE = 0.5  # a power of two, so that a step with small whole numbers is exact
ALL_REDUCE, PUSH_PULL, BROADCAST = "all_reduce", "push_pull", "broadcast"
OPERATIONS = (ALL_REDUCE, PUSH_PULL, BROADCAST)


@dataclass(frozen=True)
class Entry:
    """One line of the table of backends.

    Args:
        module: in this folder.
        here: the operations that it is measured for on one host; what else there is for broadcast than those named
            does the same as one of them.
        between: the same between emulated hosts.
        ours: whether it is this library.
        limit: whether it computes nothing, and is what the machine allows.
        encrypted: whether it is another one over TLS, on the loopback too; its name is that one's with TLS behind it.
    """

    module: str
    here: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    ours: bool = False
    limit: bool = False
    encrypted: bool = False


TLS = "-tls"
SUMS, BOTH, ROUNDS = (ALL_REDUCE,), (ALL_REDUCE, BROADCAST), (PUSH_PULL,)
TABLE = {
    "shm": Entry("gradsync", BOTH, ours=True),
    "shm-copied": Entry("gradsync", SUMS, ours=True),
    "tcp": Entry("gradsync", BOTH, BOTH, ours=True),
    "tcp-tls": Entry("gradsync", BOTH, BOTH, ours=True, encrypted=True),
    "tcp-ring": Entry("gradsync", SUMS, ours=True),
    "tcp-checksum": Entry("gradsync", BOTH, ours=True),
    "gloo": Entry("paddle_gloo", BOTH, BOTH),
    "torch-gloo": Entry("torch_gloo", BOTH, BOTH),
    "mpi": Entry("mpi", BOTH),
    "memory-limit": Entry("limits", BOTH, limit=True),
    "loopback-limit": Entry("limits", BOTH, limit=True),
    "ring-limit": Entry("limits", (), BOTH, limit=True),
    "link": Entry("limits", limit=True),  # between emulated hosts it is always measured
    "nccl": Entry("gradsync", SUMS, ours=True),
    "nccl-ring": Entry("gradsync", SUMS, ours=True),
    "nccl-raw": Entry("nccl_raw", SUMS),
    "torch-nccl": Entry("torch_nccl", SUMS),
    "ps-shm": Entry("parameter_server", ROUNDS, ours=True),
    "ps-shm-copied": Entry("parameter_server", ROUNDS, ours=True),
    "ps-tcp": Entry("parameter_server", ROUNDS, ROUNDS, ours=True),
    "ps-grpc": Entry("parameter_server", ROUNDS, ROUNDS, ours=True),
    "ps-tcp-tls": Entry("parameter_server", ROUNDS, ROUNDS, ours=True, encrypted=True),
    "ps-grpc-tls": Entry("parameter_server", ROUNDS, ROUNDS, ours=True, encrypted=True),
    "tcp-sgd": Entry("ring_sgd", ROUNDS, ROUNDS, ours=True),
    "ray": Entry("ray_server", ROUNDS),
    "torch-rpc": Entry("torch_rpc", ROUNDS),
    "round-limit": Entry("limits", ROUNDS, limit=True),
    "memcpy": Entry("limits", ROUNDS, limit=True),
}
BACKENDS = tuple(TABLE)
OURS = tuple(name for name, entry in TABLE.items() if entry.ours)


def possible(operation: str, *, emulated: bool) -> tuple[str, ...]:
    """The backends that can carry out an operation on one host, or between emulated ones."""
    return tuple(name for name, entry in TABLE.items() if operation in (entry.between if emulated else entry.here))


def is_limit(backend: str) -> bool:
    """Whether it computes nothing, and is what the machine allows."""
    return backend in TABLE and TABLE[backend].limit


def is_encrypted(backend: str) -> bool:
    """Whether it is measured with --tls only."""
    return backend in TABLE and TABLE[backend].encrypted


def over_tls(backend: str) -> str:
    """The same over TLS; "": that is not measured."""
    return name if is_encrypted(name := backend + TLS) else ""


def plain_of(backend: str) -> str:
    """What an encrypted one stands beside."""
    return backend.removesuffix(TLS)


class Member(Protocol):
    """One rank of a group. One that works on a GPU has `xp`, the module cupy."""

    array: npt.NDArray[Any]  # what the operation works on, in place, or the gradients; CuPy's if there is `xp`
    parameters: npt.NDArray[Any]  # of push_pull

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:
        """Join the group; `address` is an abstract socket's name, or, if the module has `uses_ports` or the hosts are
        emulated, a free HOST:PORT on each rank's host (on each server's, if it has a `SERVER`), separated by commas."""

    def resize(self, count: int) -> None:
        """Make `array` hold `count` float32."""

    def all_reduce(self) -> None:
        """Block until the sums are there; of push_pull's `push_pull`, until the parameters are; of a broadcast's
        `broadcast`, until rank 0's values are there, or on rank 0 until they may be overwritten."""

    def close(self) -> None: ...


def load_backend(name: str) -> Any:
    """The module of a backend: its `Rank` class (a Member) and `why_absent(name)`; besides, where they are needed:

    launch(nranks): the command that starts all ranks at once, as mpirun.
    sums: False if it computes nothing.
    restless: True if its processes take the cores while they wait, too.
    driven_by_rank_0: True if the other ranks' processes are idle; its `changed()` tells that `array` has new values.
    SERVER: the module that is a server: `python -m SERVER ADDRESS I/S NRANKS MEMORY`, which may write to the file
        MEMORY what it uses after its imports (common/system/process_memory.py).

    Raises:
        UsageError: unknown name.
    """
    return importlib.import_module(f"benchmarks.contestants.{TABLE[choose('backend', name, BACKENDS)].module}")
