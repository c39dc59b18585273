"""One host, or several as network namespaces, on which the processes of a job with a token are started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.netlab.cluster import Cluster

__all__ = ["PLACES", "Place", "place_named"]

PLACES = ("one host", "several hosts")


@dataclass(frozen=True)
class Place:
    """
    Args:
        within: what a command begins with on each host.
        addresses: of each.
    """

    within: tuple[tuple[str, ...], ...]
    addresses: tuple[str, ...]

    def host(self, number: int) -> tuple[str, ...]:
        """Of a member, or of a stranger, who has a host of his own where there are several."""
        return self.within[min(number, len(self.within) - 1)]


@contextmanager
def place_named(name: str) -> Iterator[Place]:
    if name == "one host":
        yield Place(((),), ("127.0.0.1",))
        return
    with Cluster([0, 0, 0]) as cluster:
        within = tuple(("ip", "netns", "exec", each) for each in cluster.names)
        yield Place(within, tuple(map(cluster.address, range(3))))
