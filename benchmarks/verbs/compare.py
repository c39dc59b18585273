"""The main job: certificate, measurements, report, in this order."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace
from rich.console import Console

from benchmarks.contestants.table_of_trainings import Contestant
from benchmarks.flags.compare import CompareConfig
from benchmarks.measuring.measurement import Measurement, OnRun
from benchmarks.measuring.run import check_output, run
from benchmarks.netlab.config import ClusterConfig
from benchmarks.operations.link import measure_link
from benchmarks.records.compare import CompareResults, Run
from benchmarks.records.environment import head
from benchmarks.reports.compare.terminal import print_terminal
from benchmarks.training.certificate import certify, require_identical
from benchmarks.training.measure import Records, measure_round, records_from, records_to_json, summarise
from benchmarks.training.pool import WorkerPool
from common.errors import CertificateFailed, UsageError
from common.launch.job import FOLDER

__all__ = ["Comparison", "compare"]


def compare(config: CompareConfig) -> int:
    """Run the comparison and write `results.json`, `report.md` and `report.html` to `config.out`.

    Raises:
        UsageError: all who were asked for are absent.
        CertificateFailed: schemes that must compute the same bits did not; the report then says where, and holds
            no speed; or a measured training did not, and nothing is left in `config.out`.
    """
    check_output(Comparison.file, config)
    console = Console(highlight=False)
    return run(Comparison(config, console), config, console)


class Comparison(Measurement[CompareResults]):
    """The built-in training under every scheme.

    Raises:
        UsageError: all who were asked for are absent.
    """

    file, report = "results.json", "report"

    def __init__(self, config: CompareConfig, console: Console) -> None:
        self._config, self._absent = config, config.absent()
        for scheme, why in self._absent.items():
            console.print(f"absent: {scheme}: {why}", soft_wrap=True, markup=False)
        self._contestants = [each for each in config.contestants() if each.scheme not in self._absent]
        if not self._contestants:
            raise UsageError("; ".join(f"{scheme} is absent: {why}" for scheme, why in self._absent.items()))
        self._ranks = max(each.nranks for each in self._contestants)
        self._head, self._records, self._streams = head(), Records(), list[float]()

    @property
    def rounds(self) -> int:
        return self._config.repetitions if self._certificate.passed else 0

    def cost(self) -> int:
        whole_batches = {each.nranks for each in self._contestants if each.nranks > 1}
        return len(self._contestants) * (1 + self._config.repetitions) + len(whole_batches)

    @contextmanager
    def prepared(self, on_run: OnRun) -> Iterator[None]:
        servers = max(each.servers for each in self._contestants)
        with (
            tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder,
            self._config.cluster.make() as self._hosts,
            WorkerPool(self._ranks, servers, self._hosts) as self._pool,
        ):
            self._certificate = certify(self._pool, self._contestants, self._config, Path(folder), on_run=on_run)
            if self._certificate.passed:
                self._measure_link()
            yield

    def make_round(self, number: int, on_run: OnRun) -> None:
        last = self._config.repetitions
        measure_round(
            self._pool,
            self._contestants,
            number,
            training_of=self._config.for_ranks,
            warmup_steps=self._config.warmup_steps,
            trace=self._config.trace if number == last - 1 else None,
            records=self._records,
            on_run=on_run,
            where=f"round {number + 1} of {last}",
        )

    def finish(self, on_run: OnRun) -> None:  # noqa: ARG002
        self._measure_link()

    def _measure_link(self) -> None:
        """Before the rounds, and after them."""
        self._streams += measure_link(self._config.cluster, self._hosts)

    def state(self) -> Any:
        return records_to_json(self._records)

    def restore(self, kept: Any) -> None:
        self._records.update(records_from(kept, self._contestants))

    def keep_whole_rounds(self) -> bool:
        return keep_whole_rounds(self._records, self._contestants)

    def results(self, *, interrupted: bool = False) -> CompareResults:
        require_identical(self._records)
        runs = [summarise(contestant, mine) for contestant, mine in self._records.items()]
        found = CompareResults(
            **self._head,
            scaling=self._config.scaling,
            missing=self._absent,
            runs=runs,
            certificate=self._certificate,
            interrupted=interrupted,
        )
        return self._on_a_network(found) if self._streams else found

    def _on_a_network(self, found: CompareResults) -> CompareResults:
        """What the network could do, and each step with the least time that it needs for that."""
        cluster, rate = self._config.cluster, median(self._streams)
        described = cluster.describe()
        assert described
        runs = [
            replace(run, least_sync_ms=1e3 * least_seconds(contestant, run, cluster, rate, first_server=self._ranks))
            for contestant, run in zip(self._records, found.runs, strict=True)
        ]
        return replace(found, runs=runs, cluster=replace(described, stream_bytes_per_s=rate))

    def show(self, results: CompareResults, console: Console) -> None:
        print_terminal(results, console)

    def judge(self, results: CompareResults) -> None:
        if not results.certificate.passed:
            raise CertificateFailed(f"the schemes did not compute the same; see {self._config.out / 'report.md'}")


def keep_whole_rounds(records: Records, contestants: Sequence[Contestant]) -> bool:
    """Of an interrupted measurement; False if there is none."""
    whole = min(len(records.get(contestant, ())) for contestant in contestants)
    for mine in records.values():
        del mine[whole:]
    return whole > 0


def least_seconds(contestant: Contestant, run: Run, cluster: ClusterConfig, rate: float, *, first_server: int) -> float:
    """The least time in which the network can carry what a step moves.

    Args:
        rate: bytes/s of a plain stream over the link.
    """
    nbytes, nranks = run.parameter_bytes, contestant.nranks
    if contestant.scheme == "ps":
        return cluster.round_seconds(nbytes, rate, nranks, contestant.servers, first_server=first_server)
    return cluster.ring_seconds(nbytes, rate, nranks)
