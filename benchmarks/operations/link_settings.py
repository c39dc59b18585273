"""A link and a size, what was measured there, and the cells of crossover.json that it makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from benchmarks.netlab.config import ClusterConfig
from benchmarks.records.crossover import Cell, Time
from benchmarks.stats.units import size_in_words

__all__ = ["RING", "Scheme", "Setting", "cell", "least_seconds", "seconds"]


class Scheme(NamedTuple):
    """So many parameter servers; none: the ring.

    Args:
        apart: server s has host N + s to itself; else it shares host s mod N with a rank.
    """

    servers: int
    apart: bool = False

    def __str__(self) -> str:
        if not self.servers:
            return "ring"
        one = self.servers == 1
        own = f" on {'a host of its own' if one else 'hosts of their own'}" if self.apart else ""
        return f"{self.servers} server{'' if one else 's'}{own}"

    def hosts(self, nranks: int) -> int:
        """How many take part."""
        return nranks + self.servers * self.apart

    def placed(self, nranks: int) -> list[int]:
        """The host of each server."""
        return [(nranks + server) % self.hosts(nranks) for server in range(self.servers)]


RING = Scheme(0)


@dataclass
class Setting:
    """A link and a size, and what one number of ranks measured there.

    Args:
        fresh: whether the groups come to it with another size, so that their first step touches new memory.
        steps, warmups: of a round, by scheme.
        rates: of a plain stream over the link, bytes/s, one a round.
        times: the median of each round in seconds, by scheme.
    """

    nranks: int
    cluster: ClusterConfig
    nbytes: int
    fresh: bool
    steps: dict[Scheme, int] = field(default_factory=dict)
    warmups: dict[Scheme, int] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    times: dict[Scheme, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def where(self) -> str:
        return f"N={self.nranks}, {self.cluster.link}, {size_in_words(self.nbytes)}"

    def to_json(self) -> dict[str, Any]:
        """As it is kept between rounds."""
        return {"rates": self.rates, "times": [*self.times.items()]}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Take up what `to_json` made."""
        self.rates += content["rates"]
        self.times.update({Scheme(*scheme): times for scheme, times in content["times"]})

    def cells(self) -> list[Cell]:
        """One for each placement of servers that was measured as well as the ring."""
        ring = self.times[RING]
        measured = [(scheme, times) for scheme, times in self.times.items() if scheme != RING and times and ring]
        return [
            cell(self.cluster, self.nranks, scheme, self.nbytes, self.rates, ring, times)
            for scheme, times in sorted(measured)
        ]


def cell(
    cluster: ClusterConfig,
    nranks: int,
    scheme: Scheme,
    nbytes: int,
    rates: Sequence[float],
    ring: Sequence[float],
    ps: Sequence[float],
) -> Cell:
    """
    Args:
        scheme: of servers.
        rates: of a plain stream over the link, bytes/s, one a round.
        ring, ps: the median of each round, in seconds.
    """
    rate, made = median(rates), min(len(ring), len(ps))
    ring, ps = ring[:made], ps[:made]  # of an interrupted round one may lack
    return Cell(
        link=cluster.link,
        link_bytes_per_s=cluster.links()[0],
        stream_bytes_per_s=rate,
        stream_bytes_per_s_interval=(min(rates), max(rates)),
        nranks=nranks,
        servers=scheme.servers,
        apart=scheme.apart,
        bytes=nbytes,
        ring=time_of(ring, least_seconds(cluster, nbytes, rate, nranks, RING)),
        ps=time_of(ps, least_seconds(cluster, nbytes, rate, nranks, scheme)),
        ratio=median(ring) / median(ps),
        rounds=made,
    )


def time_of(times: Sequence[float], bound: float) -> Time:
    middle, in_ms = median(times), [1e3 * each for each in times]
    return Time(
        time_ms=1e3 * middle,
        time_ms_interval=(min(in_ms), max(in_ms)),
        time_ms_rounds=in_ms,
        bound_ms=1e3 * bound,
        of_bound=bound / middle,
    )


def least_seconds(cluster: ClusterConfig, nbytes: int, rate: float, nranks: int, scheme: Scheme) -> float:
    """The least time of a step: of the busiest link's bytes. Servers apart add their own links; the ring uses only the
    ranks'.

    Args:
        cluster: of the ranks' hosts.
        rate: bytes/s that a link was found to carry.
    """
    if scheme == RING:
        return cluster.ring_seconds(nbytes, rate, nranks)
    everyone = replace(cluster, hosts=scheme.hosts(nranks))
    return everyone.round_seconds(nbytes, rate, nranks, scheme.servers)


def seconds(cluster: ClusterConfig, nbytes: int, nranks: int, scheme: Scheme, steps: int) -> int:
    """About how long so many steps take, for the time left: push and pull come one after the other."""
    turns = 1 if scheme == RING else 2
    return 1 + round(turns * steps * least_seconds(cluster, nbytes, cluster.links()[0], nranks, scheme))
