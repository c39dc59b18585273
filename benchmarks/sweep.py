"""`python -m benchmarks sweep`: one operation over sizes and ranks, all backends in turn, in nccl-tests' manner."""

from __future__ import annotations

import json
import secrets
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environment import describe_environment
from benchmarks.peers import load_peer
from benchmarks.sweep_config import SweepConfig, size_in_words
from common.entry import check_writable
from common.errors import GradSyncError
from common.launch import Job

__all__ = ["run_sweep"]

START_S = 60.0  # for a group to come together
FEWEST, MOST = 5, 500  # iterations of one size in one round
LIMITS = {
    "shm": "memory-limit",
    "shm-copied": "memory-limit",
    "tcp": "loopback-limit",
    **dict.fromkeys(("nccl", "nccl-ring", "torch-nccl"), "nccl-raw"),
}


class MeasuredGroup:
    """The ranks of one backend as idle processes; a context manager.

    Raises:
        GradSyncError: they did not come together, or one died.
    """

    def __init__(self, job: Job, backend: str, nranks: int) -> None:
        self.backend, self.nranks = backend, nranks
        self._job, self._resources = job, ExitStack()

    def __enter__(self) -> MeasuredGroup:
        module = load_peer(self.backend)
        control = f"gradsync-sweep-{secrets.token_hex(8)}"
        address = free_port() if getattr(module, "uses_port", False) else f"{control}-group"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{control}")
            listener.listen(self.nranks)
            listener.settimeout(START_S)
            worker = ["-m", "benchmarks.sweep_worker", self.backend, str(self.nranks), address, control]
            name = f"{self.backend} N={self.nranks}"
            if hasattr(module, "launch"):
                self._job.start(name, worker, log=f"{self.backend}-{self.nranks}", through=module.launch(self.nranks))
            else:
                for rank in range(self.nranks):
                    log = f"{self.backend}-{self.nranks}.{rank}"
                    self._job.start(f"{name} rank {rank}", [*worker, str(rank)], log=log)
            try:
                self._ranks = [self._accept(listener) for _ in range(self.nranks)]
            except TimeoutError as exc:
                self._job.check()
                raise GradSyncError(f"{name} did not come together within {START_S:g} s") from exc
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def measure(self, nbytes: int, iterations: int) -> tuple[list[float], int]:
        """(seconds of each iteration, on the slowest rank; elements that were wrong on any rank)."""
        for rank in self._ranks:
            rank.write(json.dumps({"count": nbytes // 4, "iterations": iterations}) + "\n")
            rank.flush()
        answers = []
        for rank in self._ranks:
            line = rank.readline()
            if not line:
                self._job.check()
                raise GradSyncError(f"{self.backend} N={self.nranks}: a rank ended in mid-measurement")
            answers.append(json.loads(line))
        slowest = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
        return slowest, sum(answer["wrong"] for answer in answers)

    def _accept(self, listener: socket.socket) -> Any:
        connection, _ = listener.accept()
        lines = self._resources.enter_context(connection.makefile("rw"))
        self._resources.enter_context(connection)
        json.loads(lines.readline())
        return lines


def run_sweep(config: SweepConfig) -> None:
    """Measure, print a table for each number of ranks, and write `sweep.json` and `sweep.md`.

    Raises:
        GradSyncError: a backend failed, or gave wrong sums.
    """
    console = Console(highlight=False)
    check_writable("out", config.out / "sweep.json")
    backends = config.backends.split(",")
    absent = {name: reason for name in backends if (reason := load_peer(name).why_absent(name))}
    for name, reason in absent.items():
        console.print(f"absent: {name}: {reason}", soft_wrap=True, markup=False)
    rows: list[dict[str, Any]] = []
    for nranks in sorted({int(n) for n in config.nranks.split(",")}):
        present = [name for name in backends if name not in absent]
        with Job() as job, ExitStack() as groups:
            started = [groups.enter_context(MeasuredGroup(job, name, nranks)) for name in present]
            rows += measure_all(started, config, console)
            groups.close()  # their ends of the sockets tell the workers to leave
        show(rows, nranks, console)
    results = {
        "schema": 1,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "environment": describe_environment(),
        "absent": absent,
        "rows": rows,
    }
    (config.out / "sweep.json").write_text(json.dumps(results, indent=1) + "\n")
    (config.out / "sweep.md").write_text(markdown(results))
    console.print(f"\nresults: {config.out / 'sweep.json'}, {config.out / 'sweep.md'}", soft_wrap=True)
    wrong = sorted({f"{row['backend']} N={row['nranks']}" for row in rows if row["wrong"]})
    if wrong:
        raise GradSyncError(f"wrong sums from {', '.join(wrong)}")


def measure_all(groups: Sequence[MeasuredGroup], config: SweepConfig, console: Console) -> list[dict[str, Any]]:
    """Rows of results. Every other round goes backwards, so that nobody is always last."""
    medians: dict[tuple[str, int], list[float]] = {}
    wrong: dict[tuple[str, int], int] = {}
    iterations: dict[tuple[str, int], int] = {}
    nranks = groups[0].nranks if groups else 0
    for repetition in range(config.repetitions):
        for nbytes in config.bytes:
            if console.is_terminal:
                where = f"N={nranks}, round {repetition + 1} of {config.repetitions}, {size_in_words(nbytes)}"
                console.print(f"[dim]{where}[/dim]", end="\r")
            for group in groups if repetition % 2 == 0 else reversed(groups):
                key = (group.backend, nbytes)
                if key not in iterations:
                    trial, _ = group.measure(nbytes, FEWEST)
                    iterations[key] = max(FEWEST, min(MOST, int(config.seconds / median(trial))))
                seconds, bad = group.measure(nbytes, iterations[key])
                medians.setdefault(key, []).append(median(seconds))
                wrong[key] = wrong.get(key, 0) + bad
    return [
        row_of(group, nbytes, medians[group.backend, nbytes], wrong[group.backend, nbytes], medians)
        for nbytes in config.bytes
        for group in groups
    ]


def row_of(
    group: MeasuredGroup, nbytes: int, times: list[float], wrong: int, all_times: dict[tuple[str, int], list[float]]
) -> dict[str, Any]:
    """Bandwidths as nccl-tests defines them: algbw = bytes/time, busbw = algbw x 2(N-1)/N."""
    middle = median(times)
    limit = all_times.get((LIMITS.get(group.backend, ""), nbytes))
    return {
        "backend": group.backend,
        "nranks": group.nranks,
        "bytes": nbytes,
        "time_ms": 1e3 * middle,
        "time_ms_interval": [1e3 * min(times), 1e3 * max(times)],
        "algbw_gb_s": nbytes / middle / 1e9,
        "busbw_gb_s": nbytes / middle / 1e9 * 2 * (group.nranks - 1) / group.nranks,
        "of_limit": median(limit) / middle if limit else None,
        "wrong": wrong,
    }


def show(rows: list[dict[str, Any]], nranks: int, console: Console) -> None:
    table = Table(
        "bytes",
        "backend",
        title=f"all_reduce, sum of float32, N={nranks}; bandwidths in GB/s",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for column in ("time ms", "min-max", "algbw", "busbw", "of limit", "wrong"):
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for row in (row for row in rows if row["nranks"] == nranks):
        size = size_in_words(row["bytes"])
        table.add_row("" if size == last else size, *cells(row))
        last = size
    console.print()
    console.print(table)


def cells(row: dict[str, Any]) -> list[str]:
    limit = row["backend"].endswith("-limit")
    low, high = row["time_ms_interval"]
    return [
        row["backend"],
        f"{row['time_ms']:.3g}",
        f"{low:.3g}-{high:.3g}",
        "" if limit else f"{row['algbw_gb_s']:.3g}",
        "" if limit else f"{row['busbw_gb_s']:.3g}",
        f"{row['of_limit']:.0%}" if row["of_limit"] else "",
        "" if limit else str(row["wrong"]),
    ]


def markdown(results: dict[str, Any]) -> str:
    rows = results["rows"]
    machine = results["environment"]
    lines = ["# all_reduce, sum of float32", "", f"`{results['command']}`, {results['created']}", ""]
    lines += [f"{key}: {value}  " for key, value in machine.items() if isinstance(value, (str, int, float))]
    lines += [f"absent: {name}: {reason}  " for name, reason in results["absent"].items()]
    head = ("bytes", "backend", "time ms", "min-max", "algbw GB/s", "busbw GB/s", "of limit", "wrong")
    for nranks in sorted({row["nranks"] for row in rows}):
        lines += ["", f"## N={nranks}", "", f"| {' | '.join(head)} |", "|---|---|" + "---:|" * (len(head) - 2)]
        mine = [row for row in rows if row["nranks"] == nranks]
        lines += [f"| {size_in_words(row['bytes'])} | {' | '.join(cells(row))} |" for row in mine]
    return "\n".join(lines) + "\n"


def free_port() -> str:
    """An address for a peer that cannot use an abstract socket; another process may take it first, though unlikely."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        host, port = probe.getsockname()
        return f"{host}:{port}"
