"""The main job: certificate, measurements, report, in this order."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.flags.compare import CompareConfig
from benchmarks.netlab.cluster import ClusterConfig
from benchmarks.netlab.link import measure_link
from benchmarks.records.environment import plain_head
from benchmarks.records.progress import progress
from benchmarks.records.result_files import check_history, from_plain, withdraw, write_results
from benchmarks.reports.compare.terminal import print_terminal
from benchmarks.reports.writing import write_report
from benchmarks.stats.rounds import rounds
from benchmarks.training.certificate import certify, require_identical
from benchmarks.training.contestants import Contestant
from benchmarks.training.measure import Records, measure, records_from, records_to_json, summarise
from benchmarks.training.pool import WorkerPool
from common.errors import CertificateFailed, UsageError
from common.launch.cli import check_writable
from common.launch.job import FOLDER

__all__ = ["compare"]


def compare(config: CompareConfig) -> int:
    """Run the comparison and write `results.json`, `report.md` and `report.html` to `config.out`; also of the whole
    rounds that were made when it is interrupted. Returns the exit code.

    Raises:
        UsageError: all who were asked for are absent.
        CertificateFailed: schemes that must compute the same bits did not; the report then says where, and holds
            no speed; or a measured training did not, and nothing is left in `config.out`.
    """
    check_history(config.history)
    check_writable("out", config.out / "results.json")
    console = Console(highlight=False)
    try:
        results = run_all(config, console)
    except CertificateFailed:
        withdraw(config.out, "results.json", "report.md", "report.html")
        raise
    print_terminal(results, console)  # first: the disk may be full
    interrupted = results.get("interrupted", False)
    write_results(from_plain(results), config.out / "results.json", None if interrupted else config.history)
    write_report(from_plain(results), config.out, "report", config.lang)
    console.print(f"\nreport: {config.out / 'report.html'}", soft_wrap=True)
    if not results["certificate"]["passed"]:
        raise CertificateFailed(f"the schemes did not compute the same; see {config.out / 'report.md'}")
    return 130 if interrupted else 0


def run_all(config: CompareConfig, console: Console) -> dict[str, Any]:
    """Everything that results.json holds.

    Raises:
        UsageError: all who were asked for are absent.
    """
    absent = config.absent()
    for scheme, why in absent.items():
        console.print(f"absent: {scheme}: {why}", soft_wrap=True, markup=False)
    contestants = [contestant for contestant in config.contestants() if contestant.scheme not in absent]
    if not contestants:
        raise UsageError("; ".join(f"{scheme} is absent: {why}" for scheme, why in absent.items()))
    results: dict[str, Any] = {
        **plain_head("compare"),
        "scaling": config.scaling,
        "missing": absent,
        "runs": [],
    }
    runs = len(contestants) * (1 + config.repetitions) + len({c.nranks for c in contestants if c.nranks > 1})
    ranks, servers = max(c.nranks for c in contestants), max(c.servers for c in contestants)
    with (
        tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder,
        progress(console, runs) as on_run,
        config.cluster.make() as hosts,
        WorkerPool(ranks, servers, hosts) as pool,
    ):
        results["certificate"] = certify(pool, contestants, config, Path(folder), on_run=on_run)
        if results["certificate"]["passed"]:
            records: Records = {}
            streams = measure_link(config.cluster, hosts)

            def so_far() -> dict[str, Any]:
                return {**results, **speeds(records, config, streams, first_server=ranks)}

            left = rounds(
                config.repetitions,
                config.out,
                state=lambda: records_to_json(records),
                restore=lambda kept: records.update(records_from(kept, contestants)),
                so_far=so_far,
            )
            try:
                measure(pool, contestants, config, rounds=left, records=records, on_run=on_run)
                streams += measure_link(config.cluster, hosts)
            except KeyboardInterrupt:
                keep_whole_rounds(records, contestants)
                results["interrupted"] = True
            results = so_far()
    return results


def keep_whole_rounds(records: Records, contestants: Sequence[Contestant]) -> None:
    """Of an interrupted measurement.

    Raises:
        KeyboardInterrupt: there is none.
    """
    whole = min(len(records.get(contestant, ())) for contestant in contestants)
    if not whole:
        raise KeyboardInterrupt
    for mine in records.values():
        del mine[whole:]


def speeds(records: Records, config: CompareConfig, streams: Sequence[float], *, first_server: int) -> dict[str, Any]:
    """`runs` of results.json, and between emulated hosts its `cluster`.

    Args:
        streams: bytes/s of a plain stream over the link.

    Raises:
        CertificateFailed: trainings that must end in the same bits did not.
    """
    require_identical(records)
    runs = [summarise(contestant, repetitions) for contestant, repetitions in records.items()]
    if not streams:
        return {"runs": runs}
    for contestant, run in zip(records, runs, strict=True):
        seconds = least_seconds(contestant, run, config.cluster, median(streams), first_server=first_server)
        run["least_sync_ms"] = 1e3 * seconds
    return {"runs": runs, "cluster": {**(config.cluster.describe() or {}), "stream_bytes_per_s": median(streams)}}


def least_seconds(
    contestant: Contestant, run: dict[str, Any], cluster: ClusterConfig, rate: float, *, first_server: int
) -> float:
    """The least time in which the network can carry what a step moves."""
    nbytes, nranks = run["parameter_bytes"], contestant.nranks
    if contestant.scheme == "ps":
        return cluster.round_seconds(nbytes, rate, nranks, contestant.servers, first_server=first_server)
    return cluster.ring_seconds(nbytes, rate, nranks)
