"""The flags of an emulated cluster, and the least times in which its links can carry something."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.netlab.cluster import Cluster
from benchmarks.netlab.hosts import Hosts, OneHost
from benchmarks.records import results as records
from common.errors import UsageError

__all__ = ["MOST_HOSTS", "ClusterConfig", "congestion_control", "quantity"]

MOST_HOSTS = 64
BIT_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster to be emulated on this machine."""

    hosts: int | None = None
    """Emulate so many hosts on this machine (root only). Rank r runs on host r mod hosts, server s on host (N + s) mod
    hosts (compare: N is the largest --nranks). (default: this machine as it is)"""
    link: str = "1gbit"
    """Rate of each emulated host's link, each way: 100mbit, 1gbit, ..."""
    latency: str | None = None
    """Delay of each emulated link, one way: 0.5ms, 50us, ... (default: what the kernel needs)"""
    slow_host: str | None = None
    """I:Fx: the link of host I is F times slower, as in 2:3x. (default: all are equal)"""
    cores_per_host: int | None = None
    """Pin the ranks and servers of each emulated host to so many cores of its own. (default: all hosts share all)"""

    def __post_init__(self) -> None:
        if self.hosts is None:
            given = {
                "latency": self.latency,
                "slow-host": self.slow_host,
                "link": self.link != ClusterConfig.link,
                "cores-per-host": self.cores_per_host is not None,
            }
            for flag in (flag for flag, value in given.items() if value):
                raise UsageError(f"--{flag} is for emulated hosts; give --hosts too")
        elif not 2 <= self.hosts <= MOST_HOSTS:
            raise UsageError(f"--hosts must be in 2..{MOST_HOSTS} (got {self.hosts})")
        self.links()
        self.delay()
        self.cores()

    def cores(self) -> list[list[int]] | None:
        """The cores of each host, in the order of their numbers; None: all hosts share all."""
        if self.hosts is None or self.cores_per_host is None:
            return None
        each, there = self.cores_per_host, sorted(os.sched_getaffinity(0))
        if each < 1:
            raise UsageError(f"--cores-per-host must be at least 1 (got {each})")
        if (taken := each * self.hosts) > len(there):
            raise UsageError(
                f"--cores-per-host {each} on {self.hosts} hosts needs {taken} cores, this machine has {len(there)}"
            )
        return [there[host * each : (host + 1) * each] for host in range(self.hosts)]

    def links(self) -> list[float]:
        """Bytes per second of every host's link, each way."""
        rate = quantity("link", self.link, BIT_UNITS, "1gbit") / 8
        rates = [rate] * (self.hosts or 0)
        if self.slow_host is not None:
            found = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)x", self.slow_host)
            if not found or int(found[1]) >= len(rates) or float(found[2]) < 1:
                raise UsageError(
                    f"--slow-host must be I:Fx with a host in 0..{len(rates) - 1}, as in 1:3x (got {self.slow_host!r})"
                )
            rates[int(found[1])] /= float(found[2])
        return rates

    def delay(self) -> float:
        """Seconds that each link delays what a host sends."""
        return quantity("latency", self.latency, TIME_UNITS, "0.5ms") if self.latency else 0.0

    def slowest(self) -> tuple[int, int]:
        """The host with the slowest link, and another one."""
        links = self.links()
        host = links.index(min(links))
        return host, (host + 1) % len(links)

    def ring_seconds(self, nbytes: int, rate: float, nranks: int) -> float:
        """The least time of an all-reduce: with one rank a host and equal links 2(N-1)/N M/B.

        Args:
            rate: B, bytes/s that the slowest link was found to carry; the others do as their rates say.
        """
        share = 2 * (nranks - 1) / nranks * nbytes
        return self._seconds([(rank, (rank + 1) % nranks, share) for rank in range(nranks)], rate)

    def broadcast_seconds(self, nbytes: int, rate: float, nranks: int) -> float:
        """The least time of a broadcast from rank 0: M/B, for every other host with a rank must receive all of it."""
        reached = min(nranks, len(self.links()))
        return self._seconds([(host, host + 1, nbytes) for host in range(reached - 1)], rate)

    def round_seconds(
        self, nbytes: int, rate: float, nranks: int, servers: int, *, first_server: int | None = None
    ) -> float:
        """The least time in which every rank pushes M bytes to S servers and pulls M, both at once: with a host for
        each, and equal links, max(M/B, N M/(S B)).

        Args:
            first_server: its host; by default the one after the last rank's.
        """
        first = nranks if first_server is None else first_server
        pairs = [(rank, first + server) for rank in range(nranks) for server in range(servers)]
        return self._seconds(
            [each for r, s in pairs for each in ((r, s, nbytes / servers), (s, r, nbytes / servers))], rate
        )

    def _seconds(self, traffic: Sequence[tuple[int, int, float]], rate: float) -> float:
        """The least time for (from host, to host, bytes): of the busiest direction of the busiest link. What stays on a
        host is free."""
        links = self.links()
        sent, received = [0.0] * len(links), [0.0] * len(links)
        for source, target, nbytes in traffic:
            if (source - target) % len(links):
                sent[source % len(links)] += nbytes
                received[target % len(links)] += nbytes
        rates = [rate * link / min(links) for link in links]
        return max(max(s, r) / each for s, r, each in zip(sent, received, rates, strict=True))

    def describe(self) -> records.Cluster | None:
        """For results; None without emulated hosts."""
        if self.hosts is None:
            return None
        control = congestion_control()
        return records.Cluster(
            words=self.in_words(),
            hosts=self.hosts,
            links_bytes_per_s=self.links(),
            delay_s=self.delay(),
            cores_per_host=self.cores_per_host,
            congestion_control=control,
        )

    def in_words(self) -> str:
        if self.hosts is None:
            return ""
        late = f", {self.latency} late" if self.latency else ""
        slow = f", host {self.slow_host.replace(':', ' ')} slower" if self.slow_host else ""
        own = f", {self.cores_per_host} core{'s' * (self.cores_per_host > 1)} each" if self.cores_per_host else ""
        return f"{self.hosts} hosts, {self.link}{late}{slow}{own}"

    def make(self) -> Hosts:
        """What the flags ask for, to be entered."""
        return OneHost() if self.hosts is None else Cluster(self.links(), delay=self.delay(), cores=self.cores())


def congestion_control() -> str:
    """TCP's, on this machine."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def quantity(flag: str, text: str, units: dict[str, Any], example: str) -> float:
    """A flag's number and unit.

    Raises:
        UsageError: it is none, or zero.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if not found or found[2] not in units or not float(found[1]):
        raise UsageError(f"--{flag} must be a number and {', '.join(units)}, as in {example} (got {text!r})")
    return float(found[1]) * float(units[found[2]])
