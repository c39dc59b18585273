"""`python -m benchmarks crossover`: which scheme wins, by model size, link speed and numbers of ranks and servers.

For each number of ranks a cluster is emulated once and the processes start once; then the rate of its links changes.
Both schemes make a whole step of SGD, and every rank has the new parameters:

    ring    all-reduce over TCP, then the update on every rank
    ps      gradients pushed to the servers over gRPC, the update there, parameters pulled
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from benchmarks.result_files import SCHEMA, check_history, write_results
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
        CertificateFailed: a scheme's parameters were wrong; nothing is written.
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
    except KeyboardInterrupt:
        if not cells:
            raise
        results["interrupted"] = True
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
        for cluster in clusters:
            hosts.limit(cluster.links())
            for nbytes in config.bytes:
                cells += measure_cells(schemes, link, cluster, nbytes, config, on_run)
        groups.close()  # their ends of the sockets tell the workers to leave


def measure_cells(
    schemes: dict[int, MeasuredGroup],
    link: MeasuredGroup,
    cluster: ClusterConfig,
    nbytes: int,
    config: CrossoverConfig,
    on_run: Callable[[str, int], None],
) -> list[Cell]:
    """The cells of one link and size, one for each number of servers.

    Args:
        schemes: by number of servers; RING is the ring.
    """
    nranks, stream = schemes[RING].nranks, link_bytes(cluster)
    where = f"N={nranks}, {cluster.link}, {size_in_words(nbytes)}"
    link.measure(stream, 1, warmup=0)  # the first touches memory
    steps, warmups = {}, {}
    for servers, group in schemes.items():
        on_run(f"{where}: checking {name_of(servers)}", seconds(cluster, nbytes, nranks, servers, 2))
        trial, wrong = group.measure(nbytes, 1, warmup=0)
        if wrong:
            raise CertificateFailed(f"{where}: {wrong} parameters are wrong after a step of {name_of(servers)}")
        steps[servers] = max(1, min(MOST, int(config.seconds / trial[0])))
        warmups[servers] = int(trial[0] < SLOW_S)
    times: dict[int, list[float]] = {servers: [] for servers in schemes}
    rates = []
    for repetition in range(config.repetitions):
        rates.append(stream / median(link.measure(stream, 1, warmup=0)[0]))
        for servers in schemes if repetition % 2 == 0 else reversed(schemes):
            about = seconds(cluster, nbytes, nranks, servers, steps[servers])
            on_run(f"{where}, round {repetition + 1} of {config.repetitions}: {name_of(servers)}", about)
            found, _ = schemes[servers].measure(nbytes, steps[servers], warmup=warmups[servers], check=False)
            times[servers].append(median(found))
    return [
        cell(cluster, nranks, servers, nbytes, rates, times[RING], times[servers])
        for servers in schemes
        if servers != RING
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
