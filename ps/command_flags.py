"""The flags of one command of ps each; those that a script's trainers have too (`--data-plane`) are in flags.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from common.credentials.credentials import CredentialFlags
from common.errors import UsageError, choose
from common.launch.flags import TrainingConfig
from common.launch.hosts import HostsConfig
from common.launch.on_ray.flags import EngineFlags
from common.launch.ranks import name_of
from common.launch.restarts import RestartFlags
from common.launch.settings import MOST_PROCESSES, check_rank, told_by_engine
from common.network.patience import WAIT_LIMIT_S, check_limits
from common.system.addresses import parse_addresses
from ps.flags import ScriptSettings, ServedSettings
from ps.store.modes import MODES, SYNC, Mode, parse_mode
from ps.store.shards import parse_shard

__all__ = ["RunConfig", "ServerConfig", "StatusConfig", "TrainerConfig"]

TRAINERS = tyro.conf.arg(aliases=("--trainers",))


@dataclass(frozen=True, kw_only=True)
class ServerConfig(CredentialFlags):
    """Serve one training: collect its trainers' gradients, update the parameters, and end when they have ended."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8500
    """Port to listen on; 0 lets the system choose."""
    data_port: int = 0
    """Port of the trainers' data connections over TCP; 0 lets the system choose."""
    nranks: Annotated[int, TRAINERS] = 2
    """Number of trainers."""
    shard: str = "0/1"
    """I/S: this is server I of S; each owns an equal slice of the parameters."""
    timeout: float = 30.0
    """How long to wait for a trainer that gives no sign of life, in seconds; the first one may come at any time."""
    wait_limit: float = WAIT_LIMIT_S
    """How long trainers wait for one that is alive but busy, in seconds."""
    checkpoint_dir: Path | None = None
    """Keep this server's part of the trainers' commits here: the folder that they name, which all hosts must share."""
    address_file: Path | None = None
    """Write HOST:PORT to this file once trainers can connect."""
    metrics_port: int | None = None
    """Serve figures for Prometheus at http://HOST:METRICS_PORT/metrics, if HOST is of other hosts at 127.0.0.1 unless
    --insecure is given; 0 lets the system choose. (default: none)"""

    def __post_init__(self) -> None:
        check_rank(0, self.nranks)
        parse_shard(self.shard)
        if not 0 <= self.port < 65536:
            raise UsageError(f"--port must be in 0..65535 (got {self.port})")
        if not 0 <= self.data_port < 65536:
            raise UsageError(f"--data-port must be in 0..65535 (got {self.data_port})")
        if not 0 <= (self.metrics_port or 0) < 65536:
            raise UsageError(f"--metrics-port must be in 0..65535 (got {self.metrics_port})")
        check_limits(self.timeout, self.wait_limit)


@dataclass(frozen=True, kw_only=True)
class StatusConfig(CredentialFlags):
    """Show how the training of these servers goes, until it ends or Ctrl-C."""

    servers: str = "127.0.0.1:8500"
    """HOST:PORT of every server, separated by commas."""
    interval: float = 1.0
    """Seconds between two looks."""
    once: bool = False
    """Look once only; always so where the output is no terminal."""
    timeout: float = 5.0
    """How long to wait for each server to answer, in seconds."""

    def __post_init__(self) -> None:
        parse_addresses(self.servers)
        if not (self.interval > 0 and self.timeout > 0):
            raise UsageError("--interval and --timeout must be positive numbers of seconds")


@dataclass(frozen=True, kw_only=True)
class ServedConfig(ServedSettings, TrainingConfig):
    """Training with parameter servers."""

    mode: str = "sync"
    """How far trainers may run apart: sync, ssp, async or geo."""
    staleness: int | None = None
    """Mode ssp: how many steps a trainer may be ahead of the slowest. (default: 2)"""
    local_steps: int | None = None
    """Mode geo: how many steps a trainer makes by itself before it tells the servers. (default: 4)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("mode", self.mode, MODES)
        for flag, value, mode in (("staleness", self.staleness, "ssp"), ("local-steps", self.local_steps, "geo")):
            if value is not None and self.mode != mode:
                raise UsageError(f"--{flag} is for --mode {mode} (got --mode {self.mode})")
        _ = self.consistency  # refuses a number outside its range

    @property
    def consistency(self) -> Mode:
        number = self.staleness if self.local_steps is None else self.local_steps
        return parse_mode(self.mode) if number is None else Mode(self.mode, number)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(CredentialFlags, ServedConfig):
    """Train as one rank; the servers and the other trainers are started alike, here or on other hosts."""

    rank: int = field(default_factory=lambda: told_by_engine().rank)
    """This trainer, 0..nranks-1; by default as the engine that has started this process says (Slurm, MPI, ...)."""
    nranks: Annotated[int, TRAINERS] = field(default_factory=lambda: told_by_engine().nranks)
    """Number of trainers; likewise."""
    servers: str = field(default_factory=lambda: ",".join(told_by_engine().servers) or "127.0.0.1:8500")
    """HOST:PORT of every server, separated by commas, in the order of their --shard."""
    log_dir: tyro.conf.Suppress[Path | None] = None  # a launcher's

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank(min(self.rank, self.nranks - 1), self.nranks)  # a rank beyond is told to the others first
        parse_addresses(self.servers)


@dataclass(frozen=True, kw_only=True)
class RunConfig(ScriptSettings, ServedConfig):
    """Train with trainers on this host or several, and servers on the first.

    script.py ARGS, or -m package.module ARGS, at the end: your own Paddle program."""

    nranks: Annotated[int | None, TRAINERS] = None
    """Number of trainers, on all hosts together. (default: 2 on each)"""
    servers: int = 1
    """Number of servers."""
    data_port: int = 0
    """Port of data connections with server 0 over TCP, one more with each further server; 0 lets the system choose."""
    install: bool = True
    """Put this scheme in the place of Paddle's own groups, so that your program needs no changed import."""
    restarts: tyro.conf.OmitArgPrefixes[RestartFlags] = field(default_factory=RestartFlags)
    on: tyro.conf.OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)
    hosts: tyro.conf.OmitArgPrefixes[HostsConfig] = field(default_factory=HostsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hosts.ranks_each(self.nranks)
        if self.servers < 1:
            raise UsageError(f"--servers must be at least 1 (got {self.servers})")
        if not 0 <= self.data_port <= 65536 - self.servers:
            raise UsageError(f"--data-port must leave each server a port in 1..65535 (got {self.data_port})")
        if self.data_port and self.data_plane not in ("auto", "tcp"):
            raise UsageError(f"--data-port is for --data-plane tcp (got --data-plane {self.data_plane})")
        if self.servers > MOST_PROCESSES:
            raise UsageError(f"--servers can be at most {MOST_PROCESSES} (got {self.servers})")

    def check_script(self, script: Sequence[str], given: Sequence[str]) -> None:
        super().check_script(script, given)
        if script and self.consistency != SYNC:
            raise UsageError(
                f"--mode {self.mode} is for the built-in trainer so far; "
                f"{name_of(script)} can be trained in mode sync only"
            )
        if not script and self.update != "auto":
            raise UsageError("--update is for your own program; in the built-in training servers update")
