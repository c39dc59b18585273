"""The flags of `python -m benchmarks crossover`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.flags.compare import numbers
from benchmarks.netlab.config import MOST_HOSTS, ClusterConfig
from benchmarks.netlab.hosts import PORTS_EACH
from benchmarks.operations.link_settings import Scheme
from benchmarks.page.language import LANGUAGES
from benchmarks.stats.units import size_in_bytes
from common.errors import UsageError, choose

__all__ = ["CrossoverConfig"]


@dataclass(frozen=True, kw_only=True)
class CrossoverConfig:
    """Measure which scheme wins, by model size, link speed and numbers of ranks and servers, on emulated hosts (root).

    A step of SGD: through parameter servers over TCP, against an all-reduce over TCP and the update on every rank."""

    links: str = "100mbit,1gbit,10gbit"
    """Rates of the emulated links, separated by commas."""
    sizes: str = "1MB,25MB"
    """Sizes of the model, bytes of float32, separated by commas; KiB, MiB are powers of 2, KB, MB powers of 10."""
    nranks: str = "2,4"
    """Numbers of ranks, separated by commas; each has a host of its own."""
    servers: str = "1,N,N+"
    """Numbers of parameter servers, separated by commas; N is the number of ranks. Server s shares the host of rank s
    mod N; with a + after the number, each server has a further host to itself."""
    repetitions: int = 5
    """Rounds; in each, every scheme is measured in turn. Medians over rounds are reported."""
    seconds: float = 0.3
    """About how long a scheme runs in one round, though at least one step."""
    out: Path = Path("out/crossover")
    """Folder for crossover.json, crossover.md and crossover.html."""
    lang: str = "en"
    """Language of the report: en or zh."""
    history: Path | None = None
    """Folder that keeps the results of every run as a file, such as benchmarks/results/history. (default: none)"""

    def __post_init__(self) -> None:
        choose("language", self.lang, LANGUAGES)
        for count in self.counts():
            if not 2 <= count <= MOST_HOSTS:
                raise UsageError(f"--nranks must be in 2..{MOST_HOSTS}, a host for each (got {count})")
            if (hosts := self.hosts(count)) > MOST_HOSTS:
                raise UsageError(
                    f"--servers {self.servers} on hosts of their own beside {count} ranks need {hosts} hosts in all, "
                    f"at most {MOST_HOSTS} can be emulated; take fewer, or leave out the +"
                )
            self.clusters(count)
        if self.repetitions < 1 or not self.seconds > 0:
            raise UsageError("--repetitions must be at least 1, --seconds positive")
        if len(self.bytes) > 1 and (trainings := len(self.bytes) * (1 + self.repetitions)) > PORTS_EACH:
            raise UsageError(f"--sizes times 1 + --repetitions must be at most {PORTS_EACH} (got {trainings})")

    @property
    def bytes(self) -> list[int]:
        return sorted({size_in_bytes(size) for size in self.sizes.split(",")})

    def counts(self) -> list[int]:
        """Of ranks."""
        return sorted(set(numbers("nranks", self.nranks)))

    def servers_of(self, nranks: int) -> list[Scheme]:
        """The numbers and places of servers that so many ranks are measured with."""
        asked = [re.fullmatch(r"(N|0*[1-9][0-9]*)(\+?)", each.strip()) for each in self.servers.split(",")]
        found = {Scheme(nranks if each[1] == "N" else int(each[1]), bool(each[2])) for each in asked if each}
        if None in asked:
            raise UsageError(
                "--servers must be numbers or N, separated by commas, with a + for hosts of their own, as in 1,N,N+ "
                f"(got {self.servers!r})"
            )
        return sorted(found)

    def hosts(self, nranks: int) -> int:
        """That so many ranks and their servers take at most."""
        return max(scheme.hosts(nranks) for scheme in self.servers_of(nranks))

    def clusters(self, nranks: int) -> list[ClusterConfig]:
        """One of the ranks' hosts for each link, the slowest first."""
        found = [ClusterConfig(hosts=nranks, link=link.strip()) for link in self.links.split(",")]
        return sorted(found, key=lambda cluster: cluster.links()[0])
