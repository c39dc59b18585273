"""The flags of the collective commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from collective.group import ALGORITHMS, BACKENDS
from collective.nccl.binding import BINDINGS
from collective.nccl.seat import check_device
from collective.transports.links import CHECKSUMS
from common.errors import UsageError, choose
from common.launch.config import TrainingConfig, check_rank
from common.launch.hosts import HostsConfig
from common.system.addresses import parse_address

__all__ = ["CollectiveConfig", "CollectiveRunConfig", "CollectiveTrainerConfig"]


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig(TrainingConfig):
    """How the ranks exchange gradients."""

    backend: str = "auto"
    """What carries the gradients: shm, tcp, nccl, nccl-ring, or auto (nccl if each rank has a GPU, else shm or tcp)."""
    nccl_binding: str = "cupy"
    """How NCCL is called: cupy or pynccl."""
    device: str = "cpu"
    """Where the model computes: cpu, the only one so far; with NCCL gradients are copied to the GPUs and back."""
    algorithm: str = "auto"
    """How they travel: ring (tcp and nccl), direct, hierarchical (shared memory inside each host), or auto."""
    checksum: str = "auto"
    """Check what tcp carries: on, off, or auto (on between hosts)."""
    shard_optimizer: bool = False
    """Each rank updates 1/nranks of the parameters and keeps that much optimizer state; the same bits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_backend(self.backend, self.nccl_binding, self.device)
        choose("algorithm", self.algorithm, ALGORITHMS)
        choose("checksum", self.checksum, CHECKSUMS)


@dataclass(frozen=True, kw_only=True)
class CollectiveRunConfig(CollectiveConfig):
    """Train on a ring of ranks, on this host or several.

    script.py ARGS at the end: your own Paddle program."""

    nranks: int | None = None
    """Number of ranks, on all hosts together. (default: 2 on each)"""
    hosts: tyro.conf.OmitArgPrefixes[HostsConfig] = field(default_factory=HostsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hosts.ranks_each(self.nranks)

    def check_script(self, script: Sequence[str]) -> None:
        super().check_script(script)
        if script and self.shard_optimizer:
            raise UsageError("--shard-optimizer is for the built-in trainer; your own program updates by itself")


@dataclass(frozen=True, kw_only=True)
class CollectiveTrainerConfig(CollectiveConfig):
    """Train as one rank of a ring; the others are started alike, here or on other hosts."""

    rank: int = 0
    """This rank, 0..nranks-1."""
    nranks: int = 2
    """Number of ranks."""
    rendezvous: str = "127.0.0.1:8600"
    """HOST:PORT where the ranks meet; rank 0 listens there."""
    insecure: bool = False
    """Listen to other hosts although traffic is neither encrypted nor authenticated yet."""
    log_dir: tyro.conf.Suppress[Path | None] = None  # a launcher's

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank(self.rank, self.nranks)
        parse_address(self.rendezvous)


def check_backend(backend: str, nccl_binding: str, device: str) -> None:
    choose("backend", backend, BACKENDS)
    choose("NCCL binding", nccl_binding, BINDINGS)
    check_device(device)
    if device != "cpu":
        raise UsageError(
            f"--device {device}: training on the GPU is not built yet; --device cpu --backend nccl computes on the CPU "
            "and reduces the gradients on GPUs (choose them with --devices)"
        )
