"""`python -m benchmarks crossover`: which scheme wins, by model size, link speed and numbers of ranks and servers.

One cluster is emulated and the processes start once; then the rate of its links changes.
Both schemes make a whole step of SGD, and every rank has the new parameters:

    ring    all-reduce over TCP, then the update on every rank
    ps      gradients pushed to the servers over TCP, the update there, parameters pulled
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.flags.crossover import CrossoverConfig
from benchmarks.measuring.measurement import Measurement, OnRun, there_and_back
from benchmarks.measuring.run import check_output, run
from benchmarks.netlab.cluster import Cluster, why_no_cluster
from benchmarks.netlab.config import congestion_control
from benchmarks.operations.group import MeasuredGroup
from benchmarks.operations.link import link_bytes
from benchmarks.operations.link_settings import RING, Scheme, Setting, seconds
from benchmarks.records.crossover import CrossoverResults
from benchmarks.records.environment import head
from benchmarks.reports.crossover_terminal import print_terminal
from common.errors import CertificateFailed, UsageError
from common.launch.job import Job

__all__ = ["Contestants", "Crossover", "run_crossover"]

MOST = 100  # steps of one scheme in one round
SLOW_S = 0.3  # a step that takes longer needs no other one to warm it up
START_S = 4  # about what it takes for a group to come together, for the time left


def run_crossover(config: CrossoverConfig) -> int:
    """Measure, print the verdict, and write `crossover.json`, `crossover.md` and `crossover.html`.

    Raises:
        UsageError: this machine cannot emulate hosts, and why.
        CertificateFailed: a scheme's parameters were wrong; nothing is left in `config.out`.
        GradSyncError: a scheme failed.
    """
    if reason := why_no_cluster():
        raise UsageError(reason)
    check_output(Crossover.file, config)
    return run(Crossover(config), config, Console(highlight=False))


@dataclass(frozen=True)
class Contestants:
    """What one number of ranks is measured with.

    Args:
        schemes: the ring, and servers by number and place.
        link: a plain stream.
    """

    nranks: int
    schemes: Mapping[Scheme, MeasuredGroup]
    link: MeasuredGroup


class Crossover(Measurement[CrossoverResults]):
    """Ring against servers, at every number of ranks, link and size once a round, so that a machine that drifts does so
    within every interval. All numbers of ranks share one cluster, with hosts for the most of ranks and servers."""

    file, report = "crossover.json", "crossover"

    def __init__(self, config: CrossoverConfig) -> None:
        self._config, self._head = config, head()
        self._pairs: list[tuple[Setting, Contestants]] = []

    @property
    def rounds(self) -> int:
        return self._config.repetitions

    def cost(self) -> int:
        return cost(self._config)

    @contextmanager
    def prepared(self, on_run: OnRun) -> Iterator[None]:
        config = self._config
        most = max(config.hosts(count) for count in config.counts())
        self._rates = {cluster.link: cluster.links() for cluster in config.clusters(most)}
        with Cluster(next(iter(self._rates.values()))) as hosts, Job() as job, ExitStack() as running:
            self._hosts = hosts
            on_run("starting link", START_S)
            link = running.enter_context(MeasuredGroup(job, "link", hosts, range(2)))
            for count in config.counts():
                self.add(running.enter_context(groups_of(count, config, hosts, job, link, on_run)))
            self.check(on_run)
            yield
            running.close()  # their ends of the sockets tell the workers to leave

    def add(self, contestants: Contestants) -> None:
        """Measure these, too, at every link and size."""
        fastest, *others = reversed(self._config.clusters(contestants.nranks))  # first, for what a group of another
        for nbytes in self._config.bytes:  # size begins with passes through the link too
            for cluster in (fastest, *others):
                setting = Setting(contestants.nranks, cluster, nbytes, fresh=cluster is fastest)
                self._pairs.append((setting, contestants))

    def check(self, on_run: OnRun) -> None:
        """
        Raises:
            CertificateFailed: a scheme's parameters are wrong.
        """
        for setting, contestants in self._pairs:
            self.limit(setting.cluster.link)
            check(setting, contestants.schemes, self._config, on_run)

    def limit(self, link: str) -> None:
        """Give the links their rate."""
        self._hosts.limit(self._rates[link])

    def make_round(self, number: int, on_run: OnRun) -> None:
        for setting, contestants in self._pairs:
            self.limit(setting.cluster.link)
            measure_round(setting, number, contestants, self._config, on_run)

    def state(self) -> Any:
        return [setting.to_json() for setting, _ in self._pairs]

    def restore(self, kept: Any) -> None:
        for (setting, _), each in zip(self._pairs, kept, strict=True):
            setting.restore(each)

    def keep_whole_rounds(self) -> bool:
        return any(setting.cells() for setting, _ in self._pairs)

    def results(self, *, interrupted: bool = False) -> CrossoverResults:
        settings = in_order([setting for setting, _ in self._pairs], self._config)
        cells = [cell for setting in settings for cell in setting.cells()]
        return CrossoverResults(
            **self._head,
            congestion_control=congestion_control(),
            repetitions=min((cell.rounds for cell in cells), default=0),
            interrupted=interrupted,
            cells=cells,
        )

    def show(self, results: CrossoverResults, console: Console) -> None:
        print_terminal(results, console)


@contextmanager
def groups_of(
    nranks: int,
    config: CrossoverConfig,
    hosts: Cluster,
    job: Job,
    link: MeasuredGroup,
    on_run: OnRun,
) -> Iterator[Contestants]:
    with ExitStack() as groups:

        def start(scheme: Scheme) -> MeasuredGroup:
            backend, beside = (
                ("tcp-sgd", "") if scheme == RING else ("ps-tcp", f" S={scheme.servers}{'+' * scheme.apart}")
            )
            name, servers = f"{backend} N={nranks}{beside}", scheme.placed(nranks)
            on_run(f"starting {name}", START_S)
            group = MeasuredGroup(job, backend, hosts, range(nranks), operation="push_pull", servers=servers, name=name)
            return groups.enter_context(group)

        schemes = (RING, *config.servers_of(nranks))
        yield Contestants(nranks, {scheme: start(scheme) for scheme in schemes}, link)


def in_order(measured: Sequence[Setting], config: CrossoverConfig) -> list[Setting]:
    """By ranks, then links, the slowest first, then sizes as they were asked for."""
    links = [cluster.link for cluster in config.clusters(max(config.counts()))]
    return sorted(measured, key=lambda s: (s.nranks, links.index(s.cluster.link), config.bytes.index(s.nbytes)))


def check(
    setting: Setting,
    schemes: Mapping[Scheme, MeasuredGroup],
    config: CrossoverConfig,
    on_run: OnRun,
) -> None:
    """Whether every scheme's parameters are right; how many steps it makes in a round follows from how long that took.

    Raises:
        CertificateFailed: they are not.
    """
    cluster, nbytes, nranks = setting.cluster, setting.nbytes, setting.nranks
    for scheme, group in schemes.items():
        on_run(f"{setting.where}: checking {scheme}", seconds(cluster, nbytes, nranks, scheme, 2))
        trial, wrong = group.measure(nbytes, 1, warmup=0)
        if wrong:
            raise CertificateFailed(f"{setting.where}: {wrong} parameters are wrong after a step of {scheme}")
        setting.steps[scheme] = max(1, min(MOST, int(config.seconds / trial[0])))
        setting.warmups[scheme] = int(setting.fresh or trial[0] < SLOW_S)


def measure_round(
    setting: Setting,
    repetition: int,
    groups: Contestants,
    config: CrossoverConfig,
    on_run: OnRun,
) -> None:
    """A plain stream, then every scheme in turn, every other time backwards."""
    cluster, nbytes, nranks = setting.cluster, setting.nbytes, setting.nranks
    link, schemes = groups.link, groups.schemes
    stream = link_bytes(cluster)
    setting.rates.append(stream / median(link.measure(stream, 1, warmup=1)[0]))
    link.rest()
    for scheme in there_and_back(list(schemes), repetition):
        about = seconds(cluster, nbytes, nranks, scheme, setting.steps[scheme])
        words = f"{setting.where}, round {repetition + 1} of {config.repetitions}: {scheme}"
        on_run(words, about)
        steps, warmup = setting.steps[scheme], setting.warmups[scheme]
        found, _ = schemes[scheme].measure(nbytes, steps, warmup=warmup, check=False)
        setting.times[scheme].append(median(found))


def cost(config: CrossoverConfig) -> int:
    """About how many seconds it takes."""
    rounds = [2] + [1] * config.repetitions
    starts = 1 + sum(1 + len(config.servers_of(nranks)) for nranks in config.counts())
    return START_S * starts + sum(
        seconds(cluster, nbytes, nranks, scheme, steps)
        for nranks in config.counts()
        for cluster in config.clusters(nranks)
        for nbytes in config.bytes
        for scheme in (RING, *config.servers_of(nranks))
        for steps in rounds
    )
