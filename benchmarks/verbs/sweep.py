"""`python -m benchmarks sweep`: one operation over sizes and ranks, all backends in turn, in nccl-tests' manner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.flags.sweep import SweepConfig, size_in_words
from benchmarks.netlab.cluster import Hosts
from benchmarks.netlab.link import link_bytes
from benchmarks.operations.group import WARMUP, MeasuredGroup
from benchmarks.peers import OURS, load_peer
from benchmarks.records.environment import plain_head
from benchmarks.records.progress import progress
from benchmarks.records.result_files import check_history, from_plain, write_results
from benchmarks.reports.sweep import TITLES, WAITING, cells, wrong_backends
from benchmarks.reports.writing import write_report
from benchmarks.stats.interval import interval
from benchmarks.stats.rounds import rounds
from common.errors import CertificateFailed, GradSyncError
from common.launch.cli import check_writable
from common.launch.job import Job
from common.system.process_memory import ProcessMemory

__all__ = ["run_sweep"]

FEWEST, MOST = 5, 5000  # iterations of one size in one round; more at once are many numbers to hand over
MOST_ON_TRIAL = 500  # calls from which it is told how many these and those before them are to be
WARM_UP_S = 0.3  # before those, at most: ranks that have slept share a core until the kernel has spread them
LATE_BYTES = 4096  # of the call to which the last rank comes late
BY_KEY = ("medians", "wrong", "iterations", "warmups")  # of Measured
MARGIN = 100e6  # bytes that a server may use beside its data
LIMITS = {  # of a backend and its variants, as in shm-copied
    "shm": "memory-limit",
    "tcp": "loopback-limit",
    "nccl": "nccl-raw",
    "torch-nccl": "nccl-raw",
    **dict.fromkeys(("ps", "ray", "torch-rpc"), "round-limit"),
}


def run_sweep(config: SweepConfig) -> int:
    """Measure, print a table for each number of ranks, and write `sweep.json`, `sweep.md` and `sweep.html`; also what
    there is when it is interrupted. Returns the exit code.

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
        **plain_head("sweep"),
        "op": config.op,
        "cluster": config.cluster.describe(),
        "servers": config.servers if config.op == "push_pull" else 0,
        "interrupted": False,
        "absent": absent,
        "failed": {},
        "rows": [],
        "waiting": [],
    }
    counts = sorted({int(n) for n in config.nranks.split(",")})
    restless = restless_among(present, config.op)
    each_round = len(config.bytes) * (len(present) > len(restless)) + len(restless)
    runs = len(counts) * (config.repetitions * each_round + waits(config))
    measured = {nranks: Measured() for nranks in counts}

    def so_far() -> dict[str, Any]:
        rows = [row for nranks, mine in measured.items() for row in rows_of(mine, present, nranks, config)]
        failed = {f"{name} N={n}": reason for n, mine in measured.items() for name, reason in mine.failed.items()}
        return {**results, "rows": rows, "failed": failed, "waiting": [w for m in measured.values() for w in m.waiting]}

    def restore(kept: Sequence[Any]) -> None:
        for mine, each in zip(measured.values(), kept, strict=True):
            mine.restore(each)

    left = rounds(
        config.repetitions,
        config.out,
        state=lambda: [mine.to_json() for mine in measured.values()],
        restore=restore,
        so_far=lambda: None if wrong_backends(so_far()) else so_far(),
    )
    try:
        with config.cluster.make() as hosts, progress(console, runs) as on_run, ExitStack() as running:
            groups = [running.enter_context(groups_of(n, present, config, hosts, measured[n])) for n in counts]
            measure_all(groups, measured, config, left, on_run)
    except KeyboardInterrupt:
        if not so_far()["rows"]:
            raise
        results["interrupted"] = True
    finally:
        results = so_far()
        for who, reason in results["failed"].items():
            console.print(f"failed: {who}: {reason}", soft_wrap=True, markup=False)
        show(results, console)
    write_results(from_plain(results), config.out / "sweep.json", None if results["interrupted"] else config.history)
    write_report(from_plain(results), config.out, "sweep", config.lang)
    console.print(f"\nreport: {config.out / 'sweep.html'}", soft_wrap=True)
    if wrong := wrong_backends(results):
        raise CertificateFailed(f"wrong sums from {', '.join(wrong)}; no speed is reported")
    return 130 if results["interrupted"] else 0


@dataclass
class Groups:
    """What one number of ranks is measured with.

    Args:
        started: those that leave the cores to others while they are not measured.
        restless: by name, how the others are started: anew in each round, when the rest of it is done.
        link: a plain stream, between emulated hosts.
    """

    nranks: int
    started: list[MeasuredGroup]
    restless: Mapping[str, Callable[[], AbstractContextManager[MeasuredGroup]]] = field(default_factory=dict)
    link: MeasuredGroup | None = None


@contextmanager
def groups_of(
    nranks: int, backends: Sequence[str], config: SweepConfig, hosts: Hosts, measured: Measured
) -> Iterator[Groups]:
    """Another library's that do not start are noted in `measured`."""
    ranks, servers = range(nranks), range(nranks, nranks + config.servers)

    def group_of(name: str, job: Job) -> MeasuredGroup:
        return MeasuredGroup(job, name, hosts, ranks, operation=config.op, servers=servers)

    @contextmanager
    def alone(name: str) -> Iterator[MeasuredGroup]:
        with Job() as job, group_of(name, job) as group:
            yield group
            group.close()  # its ends of the sockets tell the workers to leave

    restless = restless_among(backends, config.op)
    with Job() as job, ExitStack() as groups:
        started = []
        for name in (each for each in backends if each not in restless):
            with leaving(name, measured), ExitStack() as mine:
                of_its_own = job if name in OURS else mine.enter_context(Job())  # so that only it is blamed for it
                started.append(mine.enter_context(group_of(name, of_its_own)))
                groups.enter_context(mine.pop_all())
        link = (
            groups.enter_context(MeasuredGroup(job, "link", hosts, config.cluster.slowest()))
            if hosts.emulated
            else None
        )
        yield Groups(nranks, started, {name: partial(alone, name) for name in restless}, link)
        groups.close()


def restless_among(backends: Sequence[str], op: str) -> list[str]:
    """Those that are started anew for each round, one at a time: libraries that take the cores while they wait; and all
    that have servers, which together would hold some 20 GB at 100 MB."""
    return [name for name in backends if op == "push_pull" or getattr(load_peer(name), "restless", False)]


def measure_all(
    groups: Sequence[Groups],
    measured: Mapping[int, Measured],
    config: SweepConfig,
    rounds: Iterable[int],
    on_run: Callable[..., None],
) -> None:
    """Every other round goes backwards, so that nobody is always last. Another library's group that fails leaves.

    Args:
        measured: by number of ranks, what is added to.
    """
    for repetition in rounds:
        for each in groups:
            measure_round(each, measured[each.nranks], config, repetition, on_run)
    for each in groups if waits(config) else ():
        on_run(f"N={each.nranks}, waiting for a rank that is late")
        measure_waiting(each, measured[each.nranks], config)


def measure_round(
    groups: Groups, measured: Measured, config: SweepConfig, repetition: int, on_run: Callable[..., None]
) -> None:
    where, way = f"N={groups.nranks}, round {repetition + 1} of {config.repetitions}", 1 if repetition % 2 == 0 else -1
    leave(groups, measured)  # also those that failed before a job was resumed
    for nbytes in config.bytes if groups.started else ():
        on_run(f"{where}, {size_in_words(nbytes)}")
        for group in groups.started[::way]:
            with leaving(group.backend, measured):
                measured.add(group, nbytes, config)
                group.rest()
        leave(groups, measured)
    for name, start in [*groups.restless.items()][::way]:
        if name not in measured.failed:
            on_run(f"{where}, {name} alone")
            with leaving(name, measured), start() as group:
                for nbytes in config.bytes:
                    measured.add(group, nbytes, config)
    if groups.link is not None:
        measured.add(groups.link, link_bytes(config.cluster), config)


def measure_waiting(groups: Groups, measured: Measured, config: SweepConfig) -> None:
    summing = [each for each in groups.started if each.nranks > 1 and getattr(load_peer(each.backend), "sums", True)]
    for group in summing:
        with leaving(group.backend, measured):
            core = group.wait(LATE_BYTES, config.late)
            row = {"backend": group.backend, "nranks": group.nranks, "late_s": config.late, "core": core}
            measured.waiting.append(row)


def waits(config: SweepConfig) -> bool:
    """Whether it is measured what waiting costs: where the ranks wait for each other, not for a server."""
    return config.op == "all_reduce" and config.late > 0


@contextmanager
def leaving(backend: str, measured: Measured) -> Iterator[None]:
    """What fails here ends the sweep if it is ours."""
    try:
        yield
    except GradSyncError as exc:
        if backend in OURS:
            raise
        measured.failed[backend] = str(exc)


def leave(groups: Groups, measured: Measured) -> None:
    """Close those that failed."""
    for group in groups.started:
        if group.backend in measured.failed:
            group.close()
    groups.started = [group for group in groups.started if group.backend not in measured.failed]


def warm_up_of(config: SweepConfig) -> float:
    """In seconds, before each series."""
    return min(WARM_UP_S, 6 * config.seconds)


def seconds_of_a_call(group: MeasuredGroup, nbytes: int, warm_up: float) -> tuple[float, int]:
    """(about so long takes one when the ranks are awake; elements that were wrong in a first one)."""
    times, wrong = group.measure(nbytes, FEWEST)
    more = min(MOST_ON_TRIAL, int(warm_up / median(times)))
    if more > FEWEST:
        times, _ = group.measure(nbytes, more, check=False)
    return median(times), wrong


@dataclass
class Measured:
    """By backend and bytes: the median of each round in seconds, wrong elements, iterations a round, calls before."""

    medians: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    wrong: dict[tuple[str, int], int] = field(default_factory=dict)
    iterations: dict[tuple[str, int], int] = field(default_factory=dict)
    warmups: dict[tuple[str, int], int] = field(default_factory=dict)
    memory: dict[str, ProcessMemory] = field(default_factory=dict)  # by backend: of a server, at the largest size
    failed: dict[str, str] = field(default_factory=dict)  # by backend: why
    waiting: list[dict[str, Any]] = field(default_factory=list)  # the rows of `waiting` in sweep.json

    def add(self, group: MeasuredGroup, nbytes: int, config: SweepConfig) -> None:
        key = (group.backend, nbytes)
        if key not in self.iterations:
            before = warm_up_of(config)
            once, self.wrong[key] = seconds_of_a_call(group, nbytes, before)
            self.iterations[key] = max(FEWEST, min(MOST, int(config.seconds / once)))
            self.warmups[key] = max(WARMUP, int(before / once))
        times, bad = group.measure(nbytes, self.iterations[key], warmup=self.warmups[key])
        self.medians.setdefault(key, []).append(median(times))
        self.wrong[key] = self.wrong.get(key, 0) + bad
        if nbytes == max(config.bytes):
            self._note_memory(group)

    def to_json(self) -> dict[str, Any]:
        """As it is kept between rounds."""
        by_key = {name: [[*key, value] for key, value in getattr(self, name).items()] for name in BY_KEY}
        memory = {backend: asdict(found) for backend, found in self.memory.items()}
        return {**by_key, "memory": memory, "failed": self.failed, "waiting": self.waiting}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Take up what `to_json` made."""
        for name in BY_KEY:
            getattr(self, name).update({(backend, nbytes): value for backend, nbytes, value in content[name]})
        self.memory |= {backend: ProcessMemory(**found) for backend, found in content["memory"].items()}
        self.failed |= content["failed"]
        self.waiting += content["waiting"]

    def _note_memory(self, group: MeasuredGroup) -> None:
        """Of the server that uses most, and of all rounds the most."""
        for found in group.server_memory():
            most = self.memory.get(group.backend, found)
            self.memory[group.backend] = ProcessMemory(max(most.pss, found.pss), max(most.own, found.own))


def rows_of(measured: Measured, backends: Sequence[str], nranks: int, config: SweepConfig) -> list[dict[str, Any]]:
    """The link's row first, if there is one; then size by size."""
    rows = []
    rate = 0.0
    if config.cluster.hosts is not None:
        nbytes = link_bytes(config.cluster)
        times = measured.medians.get(("link", nbytes))
        if times is None:  # interrupted before the end of the first round
            return []
        rows.append(row_of("link", nranks, nbytes, times, 0, None))
        rate = nbytes / median(times)

    def bound(backend: str, nbytes: int) -> float | None:
        """The least time, in seconds."""
        if backend == "ps-grpc" and rate:
            return config.cluster.round_seconds(nbytes, rate, nranks, config.servers)
        if rate and config.op == "broadcast":
            return config.cluster.broadcast_seconds(nbytes, rate, nranks)
        if rate:
            return config.cluster.ring_seconds(nbytes, rate, nranks)
        limit = measured.medians.get((LIMITS.get(backend, LIMITS.get(backend.partition("-")[0], "")), nbytes))
        return median(limit) if limit else None

    for nbytes in config.bytes:
        for backend in backends:
            key = (backend, nbytes)
            if key in measured.medians:  # else it failed
                limit, times, wrong = bound(backend, nbytes), measured.medians[key], measured.wrong[key]
                rows.append(row_of(backend, nranks, nbytes, times, wrong, limit, op=config.op))
                if nbytes == max(config.bytes) and (memory := measured.memory.get(backend)):
                    rows[-1]["server_memory"] = memory_of_server(memory, backend, nranks, nbytes, config.servers)
    return rows


def memory_of_server(memory: ProcessMemory, backend: str, nranks: int, nbytes: int, servers: int) -> dict[str, float]:
    """In MB, above that after imports. Its limit: the parameters, one buffer of gradients (over gRPC one for each
    rank), and 100 MB; SGD keeps nothing."""
    buffers = nranks if backend == "ps-grpc" else 1
    limit = (1 + buffers) * nbytes / servers + MARGIN
    return {"pss": memory.pss / 1e6, "own": memory.own / 1e6, "limit": limit / 1e6}


def row_of(
    backend: str,
    nranks: int,
    nbytes: int,
    times: Sequence[float],
    wrong: int,
    limit: float | None,
    *,
    op: str = "all_reduce",
) -> dict[str, Any]:
    """Bandwidths as nccl-tests defines them: algbw = bytes/time, busbw = algbw x 2(N-1)/N, of a broadcast algbw.

    Args:
        times: the median of each round, in seconds.
        limit: the least time there can be, in seconds, if it is known.
    """
    middle, in_ms = median(times), [1e3 * each for each in times]
    factor = 1.0 if op == "broadcast" else 2 * (nranks - 1) / nranks
    return {
        "backend": backend,
        "nranks": nranks,
        "bytes": nbytes,
        "time_ms": 1e3 * middle,
        "time_ms_interval": interval(in_ms),
        "time_ms_rounds": in_ms,
        "algbw_gb_s": nbytes / middle / 1e9,
        "busbw_gb_s": nbytes / middle / 1e9 * factor,
        "of_limit": limit / middle if limit else None,
        "wrong": wrong,
    }


def show(results: dict[str, Any], console: Console) -> None:
    """A table for each number of ranks; none if anything was wrong, at whatever number."""
    if wrong := wrong_backends(results):
        console.print(f"\nwrong sums from {', '.join(wrong)}; no speed is shown", style="bold red")
        return
    where = f" on {results['cluster']['words']}" if results["cluster"] else ""
    for nranks in sorted({row["nranks"] for row in results["rows"]}):
        table = Table(
            "bytes",
            "backend",
            title=f"{TITLES[results['op']]}, N={nranks}{where}; bandwidths in GB/s",
            title_justify="left",
            box=None,
            pad_edge=False,
            padding=(0, 1),
        )
        for column in ("time ms", "interval", "algbw", "busbw", "of limit"):  # wrong is none, or nothing is shown
            table.add_column(column, justify="right", no_wrap=True)
        last = None
        for row in (each for each in results["rows"] if each["nranks"] == nranks):
            size = size_in_words(row["bytes"])
            table.add_row("" if size == last else size, *cells(row)[:-1])
            last = size
        console.print()
        console.print(table)
        mine = [row for row in results["waiting"] if row["nranks"] == nranks]
        if mine:
            told = ", ".join(f"{row['backend']} {row['core']:.1%}" for row in mine)
            console.print(f"\n{WAITING.format(late=mine[0]['late_s'])}: {told}", soft_wrap=True)
