"""The flags of one collective command each; those that a script's ranks have too (`--checksum`) are in flags.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from collective.flags import RingSettings
from common.credentials.credentials import CredentialFlags
from common.errors import UsageError
from common.launch.engines import PORT
from common.launch.flags import TrainingConfig
from common.launch.hosts import HostsConfig
from common.launch.on_ray.flags import EngineFlags
from common.launch.restarts import RestartFlags
from common.launch.settings import check_rank, told_by_engine
from common.system.addresses import parse_address

__all__ = ["CollectiveConfig", "CollectiveRunConfig", "CollectiveTrainerConfig"]


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig(RingSettings, TrainingConfig):
    """A training on a ring of ranks."""

    shard_optimizer: bool = False
    """Each rank updates 1/nranks of the parameters and keeps that much optimizer state; the same bits."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRunConfig(CollectiveConfig):
    """Train on a ring of ranks, on this host or several.

    script.py ARGS, or -m package.module ARGS, at the end: your own Paddle program."""

    nranks: int | None = None
    """Number of ranks, on all hosts together. (default: 2 on each)"""
    install: bool = True
    """Put this scheme in the place of Paddle's own groups, so that your program needs no changed import."""
    restarts: tyro.conf.OmitArgPrefixes[RestartFlags] = field(default_factory=RestartFlags)
    on: tyro.conf.OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)
    hosts: tyro.conf.OmitArgPrefixes[HostsConfig] = field(default_factory=HostsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hosts.ranks_each(self.nranks)

    def check_script(self, script: Sequence[str], given: Sequence[str]) -> None:
        super().check_script(script, given)
        if script and self.shard_optimizer:
            raise UsageError("--shard-optimizer is for the built-in trainer; your own program updates by itself")


@dataclass(frozen=True, kw_only=True)
class CollectiveTrainerConfig(CredentialFlags, CollectiveConfig):
    """Train as one rank of a ring; the others are started alike, here or on other hosts."""

    rank: int = field(default_factory=lambda: told_by_engine().rank)
    """This rank, 0..nranks-1; by default as the engine that has started this process says (Slurm, MPI, ...)."""
    nranks: int = field(default_factory=lambda: told_by_engine().nranks)
    """Number of ranks; likewise."""
    rendezvous: str = field(default_factory=lambda: told_by_engine().rendezvous or f"127.0.0.1:{PORT}")
    """HOST:PORT where the ranks meet; rank 0 listens there; likewise."""
    log_dir: tyro.conf.Suppress[Path | None] = None  # a launcher's

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank(min(self.rank, self.nranks - 1), self.nranks)  # a rank beyond is told to the others first
        parse_address(self.rendezvous)
