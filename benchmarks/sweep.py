"""`python -m benchmarks sweep`: one operation over sizes and ranks, all backends in turn, in nccl-tests' manner."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster import Hosts
from benchmarks.environment import describe_environment
from benchmarks.interval import interval
from benchmarks.link import link_bytes
from benchmarks.measured_group import MeasuredGroup
from benchmarks.peers import PEERS, load_peer
from benchmarks.progress import progress
from benchmarks.result_files import SCHEMA, check_history, write_results
from benchmarks.sweep_config import SweepConfig, size_in_words
from benchmarks.sweep_report import OURS, TITLES, cells, to_html, to_markdown, wrong_backends
from common.entry import check_writable
from common.errors import CertificateFailed, GradSyncError
from common.launch import Job
from common.process_memory import ProcessMemory

__all__ = ["run_sweep"]

FEWEST, MOST = 5, 500  # iterations of one size in one round
MARGIN = 100e6  # bytes that a server may use beside its data
LIMITS = {  # of a backend and its variants, as in shm-copied
    "shm": "memory-limit",
    "tcp": "loopback-limit",
    "nccl": "nccl-raw",
    "torch-nccl": "nccl-raw",
    **dict.fromkeys(("ps", "ray", "torch-rpc"), "round-limit"),
}


def run_sweep(config: SweepConfig) -> None:
    """Measure, print a table for each number of ranks, and write `sweep.json`, `sweep.md` and `sweep.html`.

    Raises:
        CertificateFailed: a backend gave wrong sums.
        GradSyncError: one of ours failed; another library's is named in the results, and the rest go on.
    """
    console = Console(highlight=False)
    check_history(config.history)
    check_writable("out", config.out / "sweep.json")
    backends = config.names()
    absent = {name: reason for name in backends if (reason := load_peer(name).why_absent(name))}
    for name, reason in absent.items():
        console.print(f"absent: {name}: {reason}", soft_wrap=True, markup=False)
    present = [name for name in backends if name not in absent]
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "sweep",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "environment": describe_environment(),
        "op": config.op,
        "cluster": config.cluster.describe(),
        "absent": absent,
        "failed": {},
    }
    rows: list[dict[str, Any]] = []
    with config.cluster.make() as hosts:
        counts = sorted({int(n) for n in config.nranks.split(",")})
        with progress(console, len(counts) * config.repetitions * len(config.bytes)) as on_run:
            for nranks in counts:
                mine, failed = measure_ranks(nranks, present, config, hosts, on_run)
                rows += mine
                results["failed"] |= failed
                for name, reason in failed.items():
                    console.print(f"failed: {name}: {reason}", soft_wrap=True, markup=False)
                show(rows, nranks, config, console)
    results["rows"] = rows
    write_results(results, config.out / "sweep.json", config.history)
    (config.out / "sweep.md").write_text(to_markdown(results))
    (config.out / "sweep.html").write_text(to_html(results))
    console.print(f"\nresults: {config.out / 'sweep.json'}, {config.out / 'sweep.md'}", soft_wrap=True)
    wrong = wrong_backends(results)
    if wrong:
        raise CertificateFailed(f"wrong sums from {', '.join(wrong)}; no speed is reported")


def measure_ranks(
    nranks: int, backends: Sequence[str], config: SweepConfig, hosts: Hosts, on_run: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of one number of ranks, between emulated hosts the link's first; and who failed, with why."""
    ranks, servers = range(nranks), range(nranks, nranks + config.servers)
    with Job() as job, ExitStack() as groups:
        started = [
            groups.enter_context(MeasuredGroup(job, name, hosts, ranks, operation=config.op, servers=servers))
            for name in backends
        ]
        link = (
            groups.enter_context(MeasuredGroup(job, "link", hosts, config.cluster.slowest()))
            if hosts.emulated
            else None
        )
        measured = measure_all(list(started), link, config, on_run)
        groups.close()  # their ends of the sockets tell the workers to leave
    failed = {f"{name} N={nranks}": reason for name, reason in measured.failed.items()}
    return rows_of(measured, started, nranks, config), failed


def measure_all(
    groups: list[MeasuredGroup], link: MeasuredGroup | None, config: SweepConfig, on_run: Callable[[str], None]
) -> Measured:
    """Every other round goes backwards, so that nobody is always last. Another library's group that fails leaves."""
    measured = Measured()
    for repetition in range(config.repetitions):
        for nbytes in config.bytes:
            nranks = groups[0].nranks if groups else 0
            on_run(f"N={nranks}, round {repetition + 1} of {config.repetitions}, {size_in_words(nbytes)}")
            for group in list(groups) if repetition % 2 == 0 else groups[::-1]:
                try:
                    measured.add(group, nbytes, config.seconds)
                    if nbytes == max(config.bytes):
                        measured.note_memory(group)
                except GradSyncError as exc:
                    if PEERS[group.backend] in OURS:
                        raise
                    measured.failed[group.backend] = str(exc)
                    groups.remove(group)
                    group.close()
        if link is not None:
            measured.add(link, link_bytes(config.cluster), config.seconds)
    return measured


@dataclass
class Measured:
    """By backend and bytes: the median of each round in seconds, wrong elements, and iterations a round."""

    medians: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    wrong: dict[tuple[str, int], int] = field(default_factory=dict)
    iterations: dict[tuple[str, int], int] = field(default_factory=dict)
    memory: dict[str, ProcessMemory] = field(default_factory=dict)  # by backend: of a server, at the largest size
    failed: dict[str, str] = field(default_factory=dict)  # by backend: why

    def add(self, group: MeasuredGroup, nbytes: int, seconds: float) -> None:
        key = (group.backend, nbytes)
        if key not in self.iterations:
            trial, _ = group.measure(nbytes, FEWEST)
            self.iterations[key] = max(FEWEST, min(MOST, int(seconds / median(trial))))
        times, bad = group.measure(nbytes, self.iterations[key])
        self.medians.setdefault(key, []).append(median(times))
        self.wrong[key] = self.wrong.get(key, 0) + bad

    def note_memory(self, group: MeasuredGroup) -> None:
        """Of the server that uses most, and of all rounds the most."""
        for found in group.server_memory():
            most = self.memory.get(group.backend, found)
            self.memory[group.backend] = ProcessMemory(max(most.pss, found.pss), max(most.own, found.own))


def rows_of(
    measured: Measured, groups: Sequence[MeasuredGroup], nranks: int, config: SweepConfig
) -> list[dict[str, Any]]:
    """The link's row first, if there is one; then size by size."""
    rows = []
    rate = 0.0
    if config.cluster.hosts is not None:
        nbytes = link_bytes(config.cluster)
        times = measured.medians["link", nbytes]
        rows.append(row_of("link", nranks, nbytes, times, 0, None))
        rate = nbytes / median(times)

    def bound(backend: str, nbytes: int) -> float | None:
        """The least time, in seconds."""
        if backend == "ps-grpc" and rate:
            return config.cluster.round_seconds(nbytes, rate, nranks, config.servers)
        if rate:
            return config.cluster.ring_seconds(nbytes, rate, nranks)
        limit = measured.medians.get((LIMITS.get(backend, LIMITS.get(backend.partition("-")[0], "")), nbytes))
        return median(limit) if limit else None

    for nbytes in config.bytes:
        for group in groups:
            key = (group.backend, nbytes)
            if key not in measured.medians:  # it failed
                continue
            limit = bound(group.backend, nbytes)
            rows.append(row_of(group.backend, nranks, nbytes, measured.medians[key], measured.wrong[key], limit))
            if nbytes == max(config.bytes) and (memory := measured.memory.get(group.backend)):
                rows[-1]["server_memory"] = memory_of_server(memory, group.backend, nranks, nbytes, config.servers)
    return rows


def memory_of_server(memory: ProcessMemory, backend: str, nranks: int, nbytes: int, servers: int) -> dict[str, float]:
    """In MB, above that after imports. Its limit: the parameters, one buffer of gradients (over gRPC one for each
    rank), and 100 MB; SGD keeps nothing."""
    buffers = nranks if backend == "ps-grpc" else 1
    limit = (1 + buffers) * nbytes / servers + MARGIN
    return {"pss": memory.pss / 1e6, "own": memory.own / 1e6, "limit": limit / 1e6}


def row_of(
    backend: str, nranks: int, nbytes: int, times: Sequence[float], wrong: int, limit: float | None
) -> dict[str, Any]:
    """Bandwidths as nccl-tests defines them: algbw = bytes/time, busbw = algbw x 2(N-1)/N.

    Args:
        times: the median of each round, in seconds.
        limit: the least time there can be, in seconds, if it is known.
    """
    middle = median(times)
    return {
        "backend": backend,
        "nranks": nranks,
        "bytes": nbytes,
        "time_ms": 1e3 * middle,
        "time_ms_interval": interval([1e3 * each for each in times]),
        "algbw_gb_s": nbytes / middle / 1e9,
        "busbw_gb_s": nbytes / middle / 1e9 * 2 * (nranks - 1) / nranks,
        "of_limit": limit / middle if limit else None,
        "wrong": wrong,
    }


def show(rows: list[dict[str, Any]], nranks: int, config: SweepConfig, console: Console) -> None:
    mine = [row for row in rows if row["nranks"] == nranks]
    if wrong := wrong_backends({"rows": mine}):
        console.print(f"\nwrong sums from {', '.join(wrong)}; no speed is shown", style="bold red")
        return
    where = f" on {words}" if (words := config.cluster.in_words()) else ""
    table = Table(
        "bytes",
        "backend",
        title=f"{TITLES[config.op]}, N={nranks}{where}; bandwidths in GB/s",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for column in ("time ms", "interval", "algbw", "busbw", "of limit", "wrong"):
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for row in mine:
        size = size_in_words(row["bytes"])
        table.add_row("" if size == last else size, *cells(row))
        last = size
    console.print()
    console.print(table)
