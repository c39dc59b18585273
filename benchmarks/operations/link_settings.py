"""A link and a size, what was measured there, and the cells of crossover.json that it makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.netlab.config import ClusterConfig
from benchmarks.records.crossover import Cell, Time
from benchmarks.stats.units import size_in_words

__all__ = ["RING", "Setting", "cell", "name_of", "seconds"]

RING = 0  # where numbers of servers name contestants


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
    steps: dict[int, int] = field(default_factory=dict)
    warmups: dict[int, int] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def where(self) -> str:
        return f"N={self.nranks}, {self.cluster.link}, {size_in_words(self.nbytes)}"

    def to_json(self) -> dict[str, Any]:
        """As it is kept between rounds."""
        return {"rates": self.rates, "times": [*self.times.items()]}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Take up what `to_json` made."""
        self.rates += content["rates"]
        self.times.update(dict(content["times"]))

    def cells(self) -> list[Cell]:
        """One for each number of servers that was measured beside the ring."""
        ring = self.times[RING]
        measured = [(servers, times) for servers, times in self.times.items() if servers != RING and times and ring]
        return [
            cell(self.cluster, self.nranks, servers, self.nbytes, self.rates, ring, times)
            for servers, times in sorted(measured)
        ]


def cell(
    cluster: ClusterConfig,
    nranks: int,
    servers: int,
    nbytes: int,
    rates: Sequence[float],
    ring: Sequence[float],
    ps: Sequence[float],
) -> Cell:
    """

    Args:
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
        servers=servers,
        bytes=nbytes,
        ring=time_of(ring, cluster.ring_seconds(nbytes, rate, nranks)),
        ps=time_of(ps, cluster.round_seconds(nbytes, rate, nranks, servers)),
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


def name_of(servers: int) -> str:
    return f"{servers} server{'s' if servers > 1 else ''}" if servers else "ring"


def seconds(cluster: ClusterConfig, nbytes: int, nranks: int, servers: int, steps: int) -> int:
    """About how long so many steps take, for the time left: push and pull come one after the other."""
    rate = cluster.links()[0]
    if servers == RING:
        return 1 + round(steps * cluster.ring_seconds(nbytes, rate, nranks))
    return 1 + round(2 * steps * cluster.round_seconds(nbytes, rate, nranks, servers))
