"""`python -m benchmarks crossover`: which scheme wins, by model size, link speed and numbers of ranks and servers.

For each number of ranks a cluster is emulated once and the processes start once; then the rate of its links changes.
Both schemes make a whole step of SGD, and every rank has the new parameters:

    ring    all-reduce over TCP, then the update on every rank
    ps      gradients pushed to the servers over gRPC, the update there, parameters pulled
"""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.cluster import Cluster, ClusterConfig, why_no_cluster
from benchmarks.crossover_config import CrossoverConfig
from benchmarks.crossover_report import print_terminal
from benchmarks.environment import describe_environment
from benchmarks.kinds import write_report
from benchmarks.link import link_bytes
from benchmarks.measured_group import MeasuredGroup
from benchmarks.progress import progress
from benchmarks.result_files import SCHEMA, check_history, withdraw, write_results
from benchmarks.sweep_config import size_in_words
from common.entry import check_writable
from common.errors import CertificateFailed, UsageError
from common.launch import Job

__all__ = ["run_crossover"]

MOST = 100  # steps of one scheme in one round
SLOW_S = 0.3  # a step that takes longer needs no other one to warm it up
START_S = 4  # about what it takes for a group to come together, for the time left
RING = 0  # where numbers of servers name contestants

Cell = dict[str, Any]


def run_crossover(config: CrossoverConfig) -> int:
    """Measure, print the verdict, and write `crossover.json`, `crossover.md` and `crossover.html`; of what there is
    after Ctrl-C, then returning 130 instead of 0, and keeping it out of the history.

    Raises:
        UsageError: this machine cannot emulate hosts, and why.
        CertificateFailed: a scheme's parameters were wrong; nothing is left in `config.out`.
        GradSyncError: a scheme failed.
    """
    if reason := why_no_cluster():
        raise UsageError(reason)
    console = Console(highlight=False)
    check_history(config.history)
    check_writable("out", config.out / "crossover.json")
    cells: list[Cell] = []
    results = {
        "schema": SCHEMA,
        "kind": "crossover",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "environment": describe_environment(),
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "repetitions": config.repetitions,
        "interrupted": False,
        "cells": cells,
    }
    try:
        with progress(console, sum(cost(nranks, config) for nranks in config.counts())) as on_run:
            for nranks in config.counts():
                measure_ranks(nranks, config, cells, on_run)
    except CertificateFailed:
        withdraw(config.out, *(f"crossover.{end}" for end in ("json", "md", "html")))
        raise
    except KeyboardInterrupt:
        if not cells:
            raise
        results |= {"interrupted": True, "repetitions": min(each["rounds"] for each in cells)}
    write_results(results, config.out / "crossover.json", None if results["interrupted"] else config.history)
    write_report(results, config.out, "crossover", config.lang)
    print_terminal(results, console)
    console.print(Text(f"\nreport: {config.out / 'crossover.html'}"), soft_wrap=True)
    return 130 if results["interrupted"] else 0


def measure_ranks(nranks: int, config: CrossoverConfig, cells: list[Cell], on_run: Callable[[str, int], None]) -> None:
    """Add the cells of one number of ranks."""
    clusters, ranks = config.clusters(nranks), range(nranks)
    with Cluster(clusters[0].links()) as hosts, Job() as job, ExitStack() as groups:

        def start(backend: str, count: int = 0) -> MeasuredGroup:
            on_run(f"N={nranks}: starting {backend}", START_S)
            where = ranks[:2] if backend == "link" else ranks
            servers = range(nranks, nranks + count)  # that is, beside rank 0, 1, ...
            operation = "all_reduce" if backend == "link" else "push_pull"
            group = MeasuredGroup(job, backend, hosts, where, operation=operation, servers=servers)
            return groups.enter_context(group)

        link = start("link")
        schemes = {RING: start("tcp-sgd"), **{count: start("ps-grpc", count) for count in config.servers_of(nranks)}}
        measure_settings(schemes, link, clusters, config, hosts.limit, cells, on_run)
        groups.close()  # their ends of the sockets tell the workers to leave


@dataclass
class Setting:
    """A link and a size, and what was measured there.

    Args:
        fresh: whether the groups come to it with another size, so that their first step touches new memory.
        steps, warmups: of a round, by scheme.
        rates: of a plain stream over the link, bytes/s, one a round.
        times: the median of each round in seconds, by scheme.
    """

    cluster: ClusterConfig
    nbytes: int
    fresh: bool
    steps: dict[int, int] = field(default_factory=dict)
    warmups: dict[int, int] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def where(self, nranks: int) -> str:
        return f"N={nranks}, {self.cluster.link}, {size_in_words(self.nbytes)}"

    def cells(self, nranks: int) -> list[Cell]:
        """One for each number of servers that was measured beside the ring."""
        ring = self.times[RING]
        measured = [(servers, times) for servers, times in self.times.items() if servers != RING and times and ring]
        return [
            cell(self.cluster, nranks, servers, self.nbytes, self.rates, ring, times)
            for servers, times in sorted(measured)
        ]


def measure_settings(
    schemes: dict[int, MeasuredGroup],
    link: MeasuredGroup,
    clusters: Sequence[ClusterConfig],
    config: CrossoverConfig,
    limit: Callable[[Sequence[float]], None],
    cells: list[Cell],
    on_run: Callable[[str, int], None],
) -> None:
    """Add the cells of all links and sizes, also if this is ended early. Each is measured once a round, so that a
    machine that drifts does so within every interval.

    Args:
        schemes: by number of servers; RING is the ring.
        clusters: one for each link, the slowest first.
        limit: gives the links their rates.
    """
    nranks = schemes[RING].nranks
    fastest = clusters[-1]  # first, for what a group of another size begins with passes through the link too
    rounds = [
        Setting(cluster, nbytes, fresh=cluster is fastest) for nbytes in config.bytes for cluster in reversed(clusters)
    ]
    try:
        for setting in rounds:
            limit(setting.cluster.links())
            check(setting, schemes, config, on_run)
        for repetition in range(config.repetitions):
            for setting in rounds:
                limit(setting.cluster.links())
                measure_round(setting, repetition, schemes, link, config, on_run)
    finally:
        order = [(cluster, nbytes) for cluster in clusters for nbytes in config.bytes]
        rounds.sort(key=lambda setting: order.index((setting.cluster, setting.nbytes)))
        cells += [each for setting in rounds for each in setting.cells(nranks)]


def check(
    setting: Setting,
    schemes: dict[int, MeasuredGroup],
    config: CrossoverConfig,
    on_run: Callable[[str, int], None],
) -> None:
    """Whether every scheme's parameters are right; how many steps it makes in a round follows from how long that took.

    Raises:
        CertificateFailed: they are not.
    """
    cluster, nbytes, nranks = setting.cluster, setting.nbytes, schemes[RING].nranks
    for servers, group in schemes.items():
        on_run(f"{setting.where(nranks)}: checking {name_of(servers)}", seconds(cluster, nbytes, nranks, servers, 2))
        trial, wrong = group.measure(nbytes, 1, warmup=0)
        if wrong:
            raise CertificateFailed(
                f"{setting.where(nranks)}: {wrong} parameters are wrong after a step of {name_of(servers)}"
            )
        setting.steps[servers] = max(1, min(MOST, int(config.seconds / trial[0])))
        setting.warmups[servers] = int(setting.fresh or trial[0] < SLOW_S)


def measure_round(
    setting: Setting,
    repetition: int,
    schemes: dict[int, MeasuredGroup],
    link: MeasuredGroup,
    config: CrossoverConfig,
    on_run: Callable[[str, int], None],
) -> None:
    """A plain stream, then every scheme in turn, every other time backwards."""
    cluster, nbytes, nranks = setting.cluster, setting.nbytes, schemes[RING].nranks
    stream = link_bytes(cluster)
    setting.rates.append(stream / median(link.measure(stream, 1, warmup=1)[0]))
    for servers in schemes if repetition % 2 == 0 else reversed(schemes):
        about = seconds(cluster, nbytes, nranks, servers, setting.steps[servers])
        words = f"{setting.where(nranks)}, round {repetition + 1} of {config.repetitions}: {name_of(servers)}"
        on_run(words, about)
        steps, warmup = setting.steps[servers], setting.warmups[servers]
        found, _ = schemes[servers].measure(nbytes, steps, warmup=warmup, check=False)
        setting.times[servers].append(median(found))


def cell(
    cluster: ClusterConfig,
    nranks: int,
    servers: int,
    nbytes: int,
    rates: Sequence[float],
    ring: Sequence[float],
    ps: Sequence[float],
) -> Cell:
    """One of the results' `cells`.

    Args:
        rates: of a plain stream over the link, bytes/s, one a round.
        ring, ps: the median of each round, in seconds.
    """
    rate = median(rates)
    return {
        "link": cluster.link,
        "link_bytes_per_s": cluster.links()[0],
        "stream_bytes_per_s": rate,
        "stream_bytes_per_s_interval": [min(rates), max(rates)],
        "nranks": nranks,
        "servers": servers,
        "bytes": nbytes,
        "ring": time_of(ring, cluster.ring_seconds(nbytes, rate, nranks)),
        "ps": time_of(ps, cluster.round_seconds(nbytes, rate, nranks, servers)),
        "ratio": median(ring) / median(ps),
        "rounds": min(len(ring), len(ps)),
    }


def time_of(times: Sequence[float], bound: float) -> dict[str, Any]:
    middle = median(times)
    return {
        "time_ms": 1e3 * middle,
        "time_ms_interval": [1e3 * min(times), 1e3 * max(times)],
        "bound_ms": 1e3 * bound,
        "of_bound": bound / middle,
    }


def name_of(servers: int) -> str:
    return f"{servers} server{'s' if servers > 1 else ''}" if servers else "ring"


def seconds(cluster: ClusterConfig, nbytes: int, nranks: int, servers: int, steps: int) -> int:
    """About how long so many steps take, for the time left: push and pull come one after the other."""
    rate = cluster.links()[0]
    if servers == RING:
        return 1 + round(steps * cluster.ring_seconds(nbytes, rate, nranks))
    return 1 + round(2 * steps * cluster.round_seconds(nbytes, rate, nranks, servers))


def cost(nranks: int, config: CrossoverConfig) -> int:
    """About how many seconds this number of ranks takes."""
    schemes = [RING, *config.servers_of(nranks)]
    rounds = [2] + [1] * config.repetitions
    return START_S * (1 + len(schemes)) + sum(
        seconds(cluster, nbytes, nranks, servers, steps)
        for cluster in config.clusters(nranks)
        for nbytes in config.bytes
        for servers in schemes
        for steps in rounds
    )
