"""The flags of a launcher that has an engine start the processes of its job."""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.errors import UsageError, choose
from common.launch.hosts import HostsConfig
from common.launch.tasks import SEVERAL
from common.system.addresses import parse_address

__all__ = ["STRATEGIES", "EngineFlags"]

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")  # of Ray's placement groups
MB = 1_000_000
CREDENTIALS = ("tls_cert", "tls_key", "tls_ca", "token_file")


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Where processes run, if not on this host."""

    engine: str | None = None
    """ray: an actor of Ray's runs each process, on the nodes of its cluster. (default: on this host)"""
    address: str | None = None
    """HOST:PORT of the cluster's head. (default: RAY_ADDRESS, else the cluster that runs here, else a new one)"""
    cpus_each: float = 1.0
    """Cores that Ray reserves for each process."""
    memory_each: int = 500
    """Memory that Ray reserves for each process, in MB."""
    strategy: str | None = None
    """PACK, SPREAD, STRICT_PACK or STRICT_SPREAD: where Ray puts them. (default: SPREAD with servers, else PACK)"""

    def __post_init__(self) -> None:
        if self.engine is None:
            for entry in fields(self):
                if getattr(self, entry.name) != entry.default:
                    raise UsageError(f"--{entry.name.replace('_', '-')} is for --engine ray: add that")
            return
        choose("engine", self.engine, ("ray",))
        if self.address not in (None, "auto"):
            parse_address(self.address or "")
        if self.strategy is not None:
            choose("strategy", self.strategy, STRATEGIES)
        if not 0 < self.cpus_each < float("inf"):
            raise UsageError(f"--cpus-each must be a positive number (got {self.cpus_each:g})")
        if self.memory_each < 1:
            raise UsageError(f"--memory-each must be at least 1 (got {self.memory_each})")

    def check(self, hosts: HostsConfig, *, traced: bool, backend: str = "") -> None:
        """Raise UsageError if what else is given is of no use where Ray starts the processes."""
        for name in SEVERAL:
            if getattr(hosts, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for hosts with a launcher each; with --engine ray the cluster's "
                    "nodes are used: give only --nranks"
                )
        given = [name for name in CREDENTIALS if getattr(hosts, name) is not None] + ["insecure"] * hosts.insecure
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')} is of no use with --engine ray: each job gets a new secret, "
                "which its processes are sent through Ray"
            )
        if traced:
            raise UsageError("--trace is for one host; leave it out with --engine ray")
        if backend.startswith("nccl"):
            raise UsageError(f"--backend {backend} is not there with --engine ray, whose ranks are given no GPUs")

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for a process."""
        return {"CPU": self.cpus_each, "memory": float(self.memory_each * MB)}
