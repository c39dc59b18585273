"""`python -m benchmarks crossover`: which scheme wins, by model size, link speed and numbers of ranks and servers.

One cluster is emulated and the processes start once; then the rate of its links changes.
Both schemes make a whole step of SGD, and every rank has the new parameters:

    ring    all-reduce over TCP, then the update on every rank
    ps      gradients pushed to the servers over gRPC, the update there, parameters pulled
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.flags.crossover import CrossoverConfig
from benchmarks.flags.sweep import size_in_words
from benchmarks.netlab.cluster import Cluster, ClusterConfig, why_no_cluster
from benchmarks.netlab.link import link_bytes
from benchmarks.operations.group import MeasuredGroup
from benchmarks.records.environment import plain_head
from benchmarks.records.progress import progress
from benchmarks.records.result_files import check_history, from_plain, withdraw, write_results
from benchmarks.reports.crossover_terminal import print_terminal
from benchmarks.reports.writing import write_report
from benchmarks.stats.rounds import rounds
from common.errors import CertificateFailed, UsageError
from common.launch.cli import check_writable
from common.launch.job import Job

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
    results: dict[str, Any] = {
        **plain_head("crossover"),
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "repetitions": config.repetitions,
        "interrupted": False,
        "cells": [],
    }
    measured: list[Setting] = []

    def so_far() -> dict[str, Any]:
        found = [cell for setting in in_order(measured, config) for cell in setting.cells()]
        return {**results, "cells": found, "repetitions": min((each["rounds"] for each in found), default=0)}

    def restore(kept: Sequence[Any]) -> None:
        for setting, each in zip(measured, kept, strict=True):
            setting.restore(each)

    left = rounds(
        config.repetitions,
        config.out,
        state=lambda: [setting.to_json() for setting in measured],
        restore=restore,
        so_far=so_far,
    )
    try:
        with progress(console, cost(config)) as on_run:
            measure_all(config, measured, left, on_run)
    except CertificateFailed:
        withdraw(config.out, *(f"crossover.{end}" for end in ("json", "md", "html")))
        raise
    except KeyboardInterrupt:
        if not so_far()["cells"]:
            raise
        results["interrupted"] = True
    results = so_far()
    print_terminal(results, console)
    write_results(
        from_plain(results), config.out / "crossover.json", None if results["interrupted"] else config.history
    )
    write_report(from_plain(results), config.out, "crossover", config.lang)
    console.print(Text(f"\nreport: {config.out / 'crossover.html'}"), soft_wrap=True)
    return 130 if results["interrupted"] else 0


@dataclass(frozen=True)
class Groups:
    """What one number of ranks is measured with.

    Args:
        schemes: by number of servers; RING is the ring.
        link: a plain stream.
    """

    nranks: int
    schemes: Mapping[int, MeasuredGroup]
    link: MeasuredGroup


def measure_all(
    config: CrossoverConfig, measured: list[Setting], rounds: Iterable[int], on_run: Callable[[str, int], None]
) -> None:
    """Add to `measured`. All numbers of ranks share one cluster, of as many hosts as there are ranks at most."""
    most = max(config.counts())
    rates = {cluster.link: cluster.links() for cluster in config.clusters(most)}
    with Cluster(next(iter(rates.values()))) as hosts, Job() as job, ExitStack() as running:

        def limit(link: str) -> None:
            hosts.limit(rates[link])

        on_run("starting link", START_S)
        link = running.enter_context(MeasuredGroup(job, "link", hosts, range(2)))
        groups = [running.enter_context(groups_of(n, config, hosts, job, link, on_run)) for n in config.counts()]
        measure_settings(groups, config, measured, rounds, limit, on_run)
        running.close()  # their ends of the sockets tell the workers to leave


@contextmanager
def groups_of(
    nranks: int,
    config: CrossoverConfig,
    hosts: Cluster,
    job: Job,
    link: MeasuredGroup,
    on_run: Callable[[str, int], None],
) -> Iterator[Groups]:
    with ExitStack() as groups:

        def start(backend: str, count: int = 0) -> MeasuredGroup:
            on_run(f"N={nranks}: starting {backend}", START_S)
            # Server s beside rank s.
            group = MeasuredGroup(job, backend, hosts, range(nranks), operation="push_pull", servers=range(count))
            return groups.enter_context(group)

        servers = {count: start("ps-grpc", count) for count in config.servers_of(nranks)}
        yield Groups(nranks, {RING: start("tcp-sgd"), **servers}, link)


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


def measure_settings(
    groups: Sequence[Groups],
    config: CrossoverConfig,
    measured: list[Setting],
    rounds: Iterable[int],
    limit: Callable[[str], None],
    on_run: Callable[[str, int], None],
) -> None:
    """Measure all numbers of ranks, links and sizes once a round, so that a machine that drifts does so within every
    interval.

    Args:
        measured: the settings are added to it, then filled.
        limit: gives the links their rate.
    """
    pairs = []  # of settings and the groups that measure them
    for each in groups:
        fastest, *others = reversed(config.clusters(each.nranks))  # first, for what a group of another size begins with
        for nbytes in config.bytes:  # passes through the link too
            for cluster in (fastest, *others):
                pairs.append((Setting(each.nranks, cluster, nbytes, fresh=cluster is fastest), each))
    measured += [setting for setting, _ in pairs]
    for setting, each in pairs:
        limit(setting.cluster.link)
        check(setting, each.schemes, config, on_run)
    for repetition in rounds:
        for setting, each in pairs:
            limit(setting.cluster.link)
            measure_round(setting, repetition, each, config, on_run)


def in_order(measured: Sequence[Setting], config: CrossoverConfig) -> list[Setting]:
    """By ranks, then links, the slowest first, then sizes as they were asked for."""
    links = [cluster.link for cluster in config.clusters(max(config.counts()))]
    return sorted(measured, key=lambda s: (s.nranks, links.index(s.cluster.link), config.bytes.index(s.nbytes)))


def check(
    setting: Setting,
    schemes: Mapping[int, MeasuredGroup],
    config: CrossoverConfig,
    on_run: Callable[[str, int], None],
) -> None:
    """Whether every scheme's parameters are right; how many steps it makes in a round follows from how long that took.

    Raises:
        CertificateFailed: they are not.
    """
    cluster, nbytes, nranks = setting.cluster, setting.nbytes, setting.nranks
    for servers, group in schemes.items():
        on_run(f"{setting.where}: checking {name_of(servers)}", seconds(cluster, nbytes, nranks, servers, 2))
        trial, wrong = group.measure(nbytes, 1, warmup=0)
        if wrong:
            raise CertificateFailed(f"{setting.where}: {wrong} parameters are wrong after a step of {name_of(servers)}")
        setting.steps[servers] = max(1, min(MOST, int(config.seconds / trial[0])))
        setting.warmups[servers] = int(setting.fresh or trial[0] < SLOW_S)


def measure_round(
    setting: Setting,
    repetition: int,
    groups: Groups,
    config: CrossoverConfig,
    on_run: Callable[[str, int], None],
) -> None:
    """A plain stream, then every scheme in turn, every other time backwards."""
    cluster, nbytes, nranks = setting.cluster, setting.nbytes, setting.nranks
    link, schemes = groups.link, groups.schemes
    stream = link_bytes(cluster)
    setting.rates.append(stream / median(link.measure(stream, 1, warmup=1)[0]))
    link.rest()
    for servers in list(schemes)[:: 1 if repetition % 2 == 0 else -1]:
        about = seconds(cluster, nbytes, nranks, servers, setting.steps[servers])
        words = f"{setting.where}, round {repetition + 1} of {config.repetitions}: {name_of(servers)}"
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
    rate, made = median(rates), min(len(ring), len(ps))
    ring, ps = ring[:made], ps[:made]  # of an interrupted round one may lack
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
        "rounds": made,
    }


def time_of(times: Sequence[float], bound: float) -> dict[str, Any]:
    middle, in_ms = median(times), [1e3 * each for each in times]
    return {
        "time_ms": 1e3 * middle,
        "time_ms_interval": [min(in_ms), max(in_ms)],
        "time_ms_rounds": in_ms,
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


def cost(config: CrossoverConfig) -> int:
    """About how many seconds it takes."""
    rounds = [2] + [1] * config.repetitions
    starts = 1 + sum(1 + len(config.servers_of(nranks)) for nranks in config.counts())
    return START_S * starts + sum(
        seconds(cluster, nbytes, nranks, servers, steps)
        for nranks in config.counts()
        for cluster in config.clusters(nranks)
        for nbytes in config.bytes
        for servers in (RING, *config.servers_of(nranks))
        for steps in rounds
    )
