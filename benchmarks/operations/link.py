"""What a plain TCP stream reaches over an emulated link: the B of every bound."""

from __future__ import annotations

from benchmarks.netlab.config import ClusterConfig
from benchmarks.netlab.hosts import Hosts
from benchmarks.operations.group import MeasuredGroup
from common.launch.job import Job

__all__ = ["link_bytes", "measure_link"]

STREAM_S = 0.2  # at the nominal rate: what a link lets pass at once does not count then
REPEATS = 5


def link_bytes(cluster: ClusterConfig) -> int:
    """How much to send, in whole float32s."""
    return 4 * int(STREAM_S * min(cluster.links()) / 4)


def measure_link(cluster: ClusterConfig, hosts: Hosts) -> list[float]:
    """Bytes/s of a few streams over the slowest link, nobody else sending; none without emulated hosts."""
    if not hosts.emulated:
        return []
    with Job() as job, MeasuredGroup(job, "link", hosts, cluster.slowest()) as group:
        seconds, _ = group.measure(link_bytes(cluster), REPEATS)
    return [link_bytes(cluster) / each for each in seconds]
