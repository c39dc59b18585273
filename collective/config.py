"""The flags of the collective commands."""

from __future__ import annotations

from dataclasses import dataclass

from collective.group import BACKENDS
from common.config import TrainingConfig, check_rank, parse_address
from common.errors import choose

__all__ = ["CollectiveRunConfig", "CollectiveTrainerConfig"]


@dataclass(frozen=True, kw_only=True)
class CollectiveRunConfig(TrainingConfig):
    """Train on a ring of ranks on this host; script.py ARGS at the end: your own Paddle program."""

    nranks: int = 2
    """Number of ranks."""
    backend: str = "auto"
    """What carries the gradients: shm, tcp, or auto (shm on one host)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank(0, self.nranks)
        choose("backend", self.backend, BACKENDS)


@dataclass(frozen=True, kw_only=True)
class CollectiveTrainerConfig(CollectiveRunConfig):
    """Train as one rank of a ring; the others are started alike, here or on other hosts."""

    rank: int = 0
    """This rank, 0..nranks-1."""
    rendezvous: str = "127.0.0.1:8600"
    """HOST:PORT where the ranks meet; rank 0 listens there."""
    insecure: bool = False
    """Listen to other hosts although traffic is neither encrypted nor authenticated yet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank(self.rank, self.nranks)
        parse_address(self.rendezvous)
