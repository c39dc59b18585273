"""`python -m benchmarks sweep`: sizes, tables, checked sums, and peers that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.flags.sweep import SweepConfig, size_in_bytes, size_in_words
from benchmarks.netlab.cluster import ClusterConfig, OneHost
from benchmarks.operations.group import MeasuredGroup
from benchmarks.operations.worker import BLOCK, measure, wrong_parameters
from benchmarks.peers import PEERS, RATE, load_peer
from benchmarks.reports.sweep import plots, to_html, to_markdown, verdict
from benchmarks.verbs.diff import load
from benchmarks.verbs.sweep import Groups, Measured, measure_all, row_of, rows_of
from common.errors import GradSyncError, UsageError
from common.launch.launch import Job
from common.system.process_memory import ProcessMemory


@pytest.mark.parametrize(
    ("text", "size"),
    [("4KiB", 4096), ("1MiB", 1 << 20), ("100MB", 10**8), ("4096", 4096), ("2 gib", 2 << 30), ("1K", 1000), ("8B", 8)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "KiB", "4 apples", "-4KiB", "0", "1.5MB", "6"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size such as 4KiB or 100MB, in whole float32s"):
        SweepConfig(sizes=f"4KiB,{text}")


@pytest.mark.parametrize(
    ("size", "words"), [(4096, "4 KiB"), (10**8, "100 MB"), (3 << 20, "3 MiB"), (12, "12 B"), (10**9, "1 GB")]
)
def test_sizes_in_words(size: int, words: str) -> None:
    assert size_in_words(size) == words


def test_flags_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"unknown backend 'glo'; did you mean 'gloo'"):
        SweepConfig(backends="shm,glo")
    with pytest.raises(UsageError, match=r"unknown op 'all_gather'"):
        SweepConfig(op="all_gather")
    with pytest.raises(UsageError, match=r"--repetitions and --servers must be at least 1"):
        SweepConfig(repetitions=0)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_says_whether_it_can_run(name: str) -> None:
    reason = load_peer(name).why_absent(name)
    assert reason == "" or "install" in reason


class FakeGroup:
    """Takes a second a call, until it ends after `lives` measurements."""

    nranks = 4

    def __init__(self, backend: str, lives: int, *, first: float = 1.0, later: float = 1.0) -> None:
        self.backend, self.lives, self.closed = backend, lives, False
        self.first, self.later = first, later  # seconds a call takes when its ranks have slept, and when they have not
        self.asked: list[tuple[int, int, bool]] = []  # calls before, calls timed, whether one is checked

    def measure(self, nbytes: int, iterations: int, *, warmup: int = 2, check: bool = True) -> tuple[list[float], int]:
        seconds = self.later if self.asked else self.first
        self.asked.append((warmup, iterations, check))
        self.lives -= 1
        if self.lives < 0:
            raise GradSyncError(f"{self.backend}: a rank ended")
        return [seconds] * iterations, 0

    def wait(self, nbytes: int, late: float) -> float:
        assert (nbytes, late) == (4096, 2.0)
        if self.lives == 0:
            raise GradSyncError(f"{self.backend}: no answer")
        return self.lives / 100

    def server_memory(self) -> list[ProcessMemory]:
        """At every measurement less is mapped, and more is a server's own: the second one's."""
        if not self.backend.startswith("ps-"):
            return []
        return [ProcessMemory(500_000_000 + self.lives, 1), ProcessMemory(1, 200_000_000 - self.lives)]

    def rest(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def fake_measurement(
    *groups: FakeGroup, config: SweepConfig | None = None, restless: Any = None, measured: Measured | None = None
) -> Measured:
    config = config or SweepConfig(sizes="4KiB,1MiB", repetitions=3, seconds=1)
    mine, there = measured or Measured(), Groups(4, [*groups], restless or {})  # type: ignore[list-item]
    measure_all([there], {4: mine}, config, range(config.repetitions), lambda _: None)
    return mine


def test_another_library_that_fails_is_named_and_the_rest_is_measured() -> None:
    groups = FakeGroup("shm", 99), FakeGroup("gloo", 3)
    measured = fake_measurement(*groups)
    assert measured.failed == {"gloo": "gloo: a rank ended"}
    assert {key: len(times) for key, times in measured.medians.items()} == {
        ("shm", 4096): 3,
        ("shm", 1 << 20): 3,
        ("gloo", 4096): 1,
    }
    assert [group.closed for group in groups] == [False, True]
    rows = rows_of(measured, ["shm", "gloo"], 4, SweepConfig(sizes="4KiB,1MiB"))
    assert [(row["backend"], row["bytes"]) for row in rows] == [("shm", 4096), ("gloo", 4096), ("shm", 1 << 20)]
    found = {**results_of(*rows), "failed": {"gloo N=4": "gloo: a rank ended"}}
    assert "gloo N=4 failed: gloo: a rank ended." in verdict(found)


@pytest.mark.parametrize(
    ("seconds", "first", "later", "trial", "series"),
    [
        (0.2, 1.0, 1.0, None, (2, 5)),
        (0.2, 0.09, 0.09, None, (3, 5)),
        (0.2, 0.007, 0.007, 42, (42, 28)),
        (0.2, 2e-4, 7e-5, 500, (4285, 2857)),
        (0.2, 7e-5, 7e-6, 500, (42857, 5000)),
        (0.01, 2e-4, 7e-5, 300, (857, 142)),
    ],
)
def test_short_calls_warm_up_by_time_and_many_are_timed(
    seconds: float, first: float, later: float, trial: int | None, series: tuple[int, int]
) -> None:
    """How many is told by what they take when ranks are awake."""
    group = FakeGroup("shm", 99, first=first, later=later)
    fake_measurement(group, config=SweepConfig(sizes="4KiB", repetitions=2, seconds=seconds))
    trials = [(2, 5, True)] + [(2, trial, False)] * (trial is not None)  # type: ignore[list-item]
    assert group.asked == [*trials, (*series, True), (*series, True)]


def test_what_was_kept_is_gone_on_from() -> None:
    first = fake_measurement(FakeGroup("shm", 99), FakeGroup("gloo", 3), FakeGroup("ps-shm", 99))
    again = Measured()
    again.failed["mpi"] = "mpi: did not start"
    again.restore(json.loads(json.dumps(first.to_json())))
    assert again.failed == {"mpi": "mpi: did not start", "gloo": "gloo: a rank ended"}
    again.failed.pop("mpi")
    assert again == first
    groups = FakeGroup("shm", 99), FakeGroup("gloo", 99)
    fake_measurement(*groups, measured=again)
    assert len(again.medians["shm", 4096]) == 6
    assert groups[1].closed
    assert len(again.medians["gloo", 4096]) == 1  # what has failed stays away


def test_what_waiting_costs_is_measured_last() -> None:
    groups = FakeGroup("memory-limit", 99), FakeGroup("shm", 12), FakeGroup("gloo", 9), FakeGroup("tcp", 14)
    groups[2].lives = 8  # its last measurement is its end
    measured = fake_measurement(*groups)
    assert measured.waiting == [
        {"backend": "shm", "nranks": 4, "late_s": 2.0, "core": 0.04},
        {"backend": "tcp", "nranks": 4, "late_s": 2.0, "core": 0.06},
    ]
    assert measured.failed == {"gloo": "gloo: no answer"}


def test_a_restless_library_is_started_anew_for_each_round_and_runs_alone() -> None:
    shm, ray, began = FakeGroup("shm", 99), FakeGroup("ray", 4), []

    @contextmanager
    def start() -> Iterator[Any]:
        began.append(99 - shm.lives)  # how often the other one was measured before
        yield ray

    config = SweepConfig(op="push_pull", sizes="4KiB,1MiB", repetitions=3, seconds=1)
    measured = fake_measurement(shm, config=config, restless={"ray": start})
    assert began == [4, 6]  # the first time each size is tried, too
    assert measured.failed == {"ray": "ray: a rank ended"}
    assert {key: len(times) for key, times in measured.medians.items() if key[0] == "ray"} == {
        ("ray", 4096): 1,
        ("ray", 1 << 20): 1,
    }


def test_what_waiting_costs_is_reported() -> None:
    found = sample()
    assert "waiting" not in to_markdown(found)
    rows = [("shm", 2, 0.0021), ("shm", 4, 0.003), ("<mpi>", 4, 0.996)]
    found["waiting"] = [{"backend": b, "nranks": n, "late_s": 2.0, "core": core} for b, n, core in rows]
    text = to_markdown(found)
    assert "Most of a core that a rank uses while it waits for one that is 2 s late" in text
    assert "| backend | N=2 | N=4 |" in text
    assert "| shm | 0.2% | 0.3% |" in text
    assert "| &lt;mpi> |  | 99.6% |" in text
    assert "&lt;mpi&gt;" in to_html(found)


def test_the_memory_of_a_server_is_the_most_of_all_rounds_at_the_largest_size() -> None:
    groups = FakeGroup("ps-shm", 99), FakeGroup("ps-grpc", 99), FakeGroup("memcpy", 99)
    config = SweepConfig(op="push_pull", sizes="1MB,400KB", repetitions=2, seconds=1, servers=2)
    measured = fake_measurement(*groups, config=config)
    rows = rows_of(measured, ["ps-shm", "ps-grpc", "memcpy"], 4, config)
    found = {(row["backend"], row["bytes"]): row["server_memory"] for row in rows if "server_memory" in row}
    assert found == {
        ("ps-shm", 10**6): pytest.approx({"pss": 500.000097, "own": 199.999906, "limit": 101.0}, abs=1e-8),
        ("ps-grpc", 10**6): pytest.approx({"pss": 500.000097, "own": 199.999906, "limit": 102.5}, abs=1e-8),
    }
    assert verdict(results_of(*rows))[-2] == (
        "N=4, memory (PSS) of a server above its imports: ps-shm 500 MB at 1 MB (its own 200, limit 101); "
        "ps-grpc 500 MB at 1 MB (its own 200, limit 102)."
    )


def test_one_of_ours_that_fails_ends_the_sweep() -> None:
    with pytest.raises(GradSyncError, match="shm: a rank ended"):
        fake_measurement(FakeGroup("shm", 3), FakeGroup("gloo", 99))


@pytest.mark.processes
def test_a_group_whose_rank_died_says_so_and_closes() -> None:
    with Job() as job:
        started = []
        start = job.start
        job.start = lambda *args, **settings: started.append(start(*args, **settings))  # type: ignore[method-assign]
        with MeasuredGroup(job, "memcpy", OneHost(), range(2), operation="push_pull") as group:
            times, wrong = group.measure(4096, 3)
            assert (len(times), wrong) == (3, 0)
            for process in started:
                process.kill()
                process.wait()
            for _ in range(2):
                with pytest.raises(GradSyncError, match=r"memcpy N=2 rank \d"):
                    group.measure(4096, 3)


class FakePeer:
    """Sums as if two more ranks had the same array; `error` is added to one element."""

    def __init__(self, error: float = 0.0) -> None:
        self.array: Any = None
        self.calls, self.error = 0, error

    def resize(self, count: int) -> None:
        self.array = np.empty(count, np.float32)

    def all_reduce(self) -> None:
        self.calls += 1
        pattern = self.array - 1 if self.array.any() else self.array
        self.array[...] = pattern * 3 + (3 if self.array.any() else 0)
        self.array[-1] += self.error


def test_a_measurement_checks_sums_and_times_each_call() -> None:
    good = FakePeer()
    found = measure(good, "all_reduce", {"count": 100, "iterations": 4, "warmup": 2}, 1, 3, checked=True)
    assert found["wrong"] == 0
    assert len(found["seconds"]) == 4
    assert good.calls == 1 + 2 + 4
    assert (
        measure(FakePeer(1.0), "all_reduce", {"count": 100, "iterations": 1, "warmup": 2}, 1, 3, checked=True)["wrong"]
        == 1
    )
    assert (
        measure(FakePeer(1.0), "all_reduce", {"count": 100, "iterations": 1, "warmup": 2}, 1, 3, checked=False)["wrong"]
        == 0
    )


class FakeServer(FakePeer):
    """SGD at 0.5 as if two more trainers had pushed; the first trainer's gradients are one less than the second's."""

    def resize(self, count: int) -> None:
        super().resize(count)
        self.parameters = np.full(count, 3.0, np.float32)

    def push_pull(self) -> None:
        self.calls += 1
        self.parameters -= np.float32(0.5) * self.array
        self.parameters[-1] += self.error


@pytest.mark.parametrize(("error", "wrong"), [(0.0, 0), (1.0, 1)])
def test_a_round_is_checked_by_its_parameters(error: float, wrong: int) -> None:
    peer = FakeServer(error)
    found = measure(peer, "push_pull", {"count": 100, "iterations": 4, "warmup": 2}, 1, 3, checked=True)
    assert found["wrong"] == wrong
    assert peer.calls == 1 + 2 + 4


def test_bandwidths_are_those_of_nccl_tests() -> None:
    row = row_of("shm", 4, 10**8, [0.1, 0.2, 0.4], 0, 0.1)
    assert row["time_ms"] == pytest.approx(200)
    assert row["time_ms_interval"] == pytest.approx([100, 400])
    assert row["algbw_gb_s"] == pytest.approx(0.5)
    assert row["busbw_gb_s"] == pytest.approx(0.75)
    assert row["of_limit"] == pytest.approx(0.5)


def results_of(*rows: dict[str, Any]) -> dict[str, Any]:
    """sweep.json with these rows."""
    machine = {"cpu": "x", "cores": 2, "memory_bytes": 10**9, "memcpy_gb_per_s": 8.0, "noise": 0.1}
    about = {"kernel": "6", "python": "3", "versions": {}, "commit": None}
    return {
        "schema": 1,
        "op": "all_reduce",
        "command": "python -m benchmarks sweep",
        "created": "2026-11-21T08:30:00+00:00",
        "cluster": None,
        "environment": {**machine, **about},
        "absent": {"mpi": "no <mpirun>"},
        "rows": list(rows),
    }


def sample() -> dict[str, Any]:
    """Twice as fast as Gloo at 100 MB, half as fast at 4 KiB, within noise at 1 MiB."""
    return results_of(
        row_of("shm", 4, 10**8, [0.1, 0.2, 0.4], 0, 0.1),
        row_of("gloo", 4, 10**8, [0.5, 0.6], 0, None),
        row_of("memory-limit", 4, 10**8, [0.1], 0, None),
        row_of("shm", 4, 4096, [2e-4], 0, 9e-5),
        row_of("gloo", 4, 4096, [1e-4], 0, None),
        row_of("shm", 4, 1 << 20, [2e-3, 1e-3], 0, 9e-4),
        row_of("gloo", 4, 1 << 20, [2e-3, 4e-3], 0, None),
    )


def test_a_report_tells_who_is_faster_and_how_near_the_limit() -> None:
    found = sample()
    assert verdict(found)[1:] == [
        "N=4, the best of ours against the best of other libraries: 4 KiB 2.0 times slower (shm 0.2 ms, gloo 0.1 ms), "
        "noise unknown; 1 MiB within noise (shm 1.5 ms, gloo 3 ms); 100 MB 2.8 times faster (shm 200 ms, gloo 550 ms).",
        "N=4: ours reaches 45% at 4 KiB to 60% at 1 MiB of what the machine allows.",
        "mpi is absent: no <mpirun>.",
    ]
    text = to_markdown(found)
    assert "| 100 MB | shm | 200 | 100–400 | 0.5 | 0.75 | 50% | 0 |" in text
    (plot,) = plots(found)
    lines = {line["text"][0].partition(",")[0]: line for line in plot.figure["data"]}
    assert lines["shm"]["x"] == [4096, 1 << 20, 10**8]
    assert lines["shm"]["y"] == pytest.approx([0.2, 1.5, 200])
    assert lines["memory-limit"]["line"]["dash"] == "dot"
    assert "50% of the limit" in lines["shm"]["text"][2]
    assert "no &lt;mpirun&gt;" in to_html(found)


def test_wrong_sums_have_no_speed() -> None:
    found = sample()
    found["rows"][0]["wrong"] = 3
    assert verdict(found)[0] == "The sums are WRONG from shm N=4; no speed is shown."
    assert not plots(found)
    for text in (to_markdown(found), to_html(found)):
        assert "WRONG" in text
        assert "550" not in text
        assert "0.75" not in text.partition("</style>")[2].replace("0.75rem", "")


def sweep(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "sweep", "--out", str(folder), *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.processes
def test_a_sweep(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['mpi4py'] = None")
    backends = "shm,shm-copied,tcp,gloo,mpi,memory-limit,loopback-limit"
    small = ["--sizes", "4KiB,100KiB", "--repetitions", "2", "--seconds", "0.005", "--late", "0.3"]
    history = tmp_path / "history"
    flags = ["--backends", backends, "--nranks", "2,3", "--history", str(history), *small]
    done = sweep(tmp_path, *flags, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (kept,) = history.iterdir()
    assert "-sweep-" in kept.name
    assert kept.read_text() == (tmp_path / "sweep.json").read_text()
    found = json.loads((tmp_path / "sweep.json").read_text())
    rows, waiting = found["rows"], found["waiting"]
    assert len(rows) == 2 * 2 * 6
    assert len(waiting) == 2 * 4
    assert all(0 <= row["core"] < 0.5 for row in waiting if row["backend"] in ("shm", "tcp"))
    assert done.stdout.count("Most of a core that a rank uses while it waits for one that is 0.3 s late: shm ") == 2
    assert all(row["wrong"] == 0 and row["time_ms"] > 0 for row in rows)
    assert {row["backend"] for row in rows if row["of_limit"]} == {"shm", "shm-copied", "tcp"}
    assert "N=3" in done.stdout
    text, page = ((tmp_path / name).read_text() for name in ("sweep.md", "sweep.html"))
    assert "| 100 KiB | tcp |" in text
    why = "mpi4py is not installed (pip install mpi4py)"
    assert f"absent: mpi: {why}\n" in done.stdout
    assert all(f"mpi is absent: {why}." in told for told in (text.replace("\\", ""), page))


@pytest.mark.processes
def test_rounds_of_parameter_servers(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    small = ["--sizes", "100KiB,40KiB", "--repetitions", "2", "--seconds", "0.005", "--nranks", "2", "--servers", "2"]
    backends = "ps-shm,ps-shm-copied,ps-grpc,round-limit,memcpy"
    done = sweep(tmp_path, "--op", "push_pull", "--lang", "zh", "--backends", backends, *small)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert len(rows) == 2 * 5
    assert all(row["wrong"] == 0 and row["time_ms"] > 0 for row in rows)
    assert {row["backend"] for row in rows if row["of_limit"]} == {"ps-shm", "ps-shm-copied", "ps-grpc"}
    memory = {row["backend"]: row["server_memory"] for row in rows if "server_memory" in row}
    assert memory.keys() == {"ps-shm", "ps-shm-copied", "ps-grpc"}
    assert all(0 < each["own"] < each["limit"] for each in memory.values())
    assert memory["ps-grpc"]["limit"] == pytest.approx(100 + 3 * 0.1024 / 2)
    assert (tmp_path / "sweep.md").read_text().startswith("# push_pull，参数服务器的一轮（float32，SGD）")


@pytest.mark.processes
def test_a_broadcast(tmp_path: Path) -> None:
    backends = "shm,tcp,memory-limit,loopback-limit"
    small = ["--nranks", "3", "--sizes", "4KiB,100KiB", "--repetitions", "1", "--seconds", "0.005"]
    done = sweep(tmp_path, "--op", "broadcast", "--backends", backends, *small)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["backend"] for row in rows] == backends.split(",") * 2
    assert all(row["wrong"] == 0 and row["time_ms"] > 0 and row["busbw_gb_s"] == row["algbw_gb_s"] for row in rows)
    assert {row["backend"] for row in rows if row["of_limit"]} == {"shm", "tcp"}
    assert (tmp_path / "sweep.md").read_text().startswith("# broadcast of float32 from rank 0\n")


class FakeBroadcast(FakePeer):
    """Rank 1, to which rank 0's values come."""

    def broadcast(self) -> None:
        self.array -= self.array.any() + self.error


@pytest.mark.parametrize(("error", "wrong"), [(0.0, 0), (1.0, 100)])
def test_a_broadcast_is_checked_by_values_that_only_rank_0_had(error: float, wrong: int) -> None:
    job = {"count": 100, "iterations": 1, "warmup": 0, "check": True}
    assert measure(FakeBroadcast(error), "broadcast", job, 1, 3, checked=True)["wrong"] == wrong


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"pace": "fast"}, r"^--pace must be a number and kbit, mbit, gbit, as in 1gbit \(got 'fast'\)$"),
        ({"pace": "35gbit"}, r"^--pace must be at most 34gbit \(got 35gbit\)$"),
        ({"pace": "1gbit", "cluster": ClusterConfig(hosts=2)}, r"^--pace is for this host as it is; the rate of emul"),
        ({"pace": "1gbit", "op": "push_pull"}, r"^--pace covers the ring's sockets, not gRPC's; for --op push"),
        ({"pace": "1gbit", "backends": "gloo"}, r"gloo cannot be measured for all_reduce on paced sockets; there"),
    ],
)
def test_a_pace_that_cannot_be(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        SweepConfig(**flags)


def test_a_kernel_that_cannot_pace_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.netlab.pacing.SO_MAX_PACING_RATE", 9999)
    with pytest.raises(UsageError, match=r"^--pace: this kernel cannot limit a socket's rate \(.*not available"):
        SweepConfig(pace="1gbit").make_hosts().__enter__()


@pytest.mark.processes
def test_paced_sockets_hold_the_rate_and_are_called_no_network(tmp_path: Path) -> None:
    small = ["--nranks", "2", "--sizes", "1MB", "--repetitions", "1", "--seconds", "0.01"]
    done = sweep(tmp_path, "--pace", "400mbit", *small)
    assert done.returncode == 0, done.stderr
    found = load(tmp_path / "sweep.json")
    assert found["cluster"]["paced_bytes_per_s"] == 50e6
    rows = {row["backend"]: row for row in found["rows"]}
    assert rows.keys() == {"tcp-ring", "loopback-limit"}
    for row in rows.values():
        assert 0.5 < row["busbw_gb_s"] / 0.05 < 1.1  # a busy machine may be slower
    assert 0.5 < rows["tcp-ring"]["of_limit"] < 1.5
    for name in ("sweep.md", "sweep.html"):
        assert "rate-limited sockets (400mbit), not a network" in (tmp_path / name).read_text()
    assert "on rate-limited sockets (400mbit), not a network" in " ".join(done.stdout.split())


@pytest.mark.processes
def test_what_a_sweep_has_measured_before_ctrl_c_is_kept(tmp_path: Path, interrupted_when: Callable[..., Any]) -> None:
    out, history = tmp_path / "out", tmp_path / "history"
    flags = ["--nranks", "2", "--sizes", "4KiB", "--backends", "shm,memory-limit", "--repetitions", "100000"]
    command = ["sweep", *flags, "--seconds", "0.001", "--out", str(out), "--history", str(history)]
    done = interrupted_when(command, lambda doing: "round " in doing and "round 1 " not in doing)
    assert (done.returncode, done.stderr) == (130, "")
    found = load(out / "sweep.json")
    assert found["interrupted"]
    assert [row["backend"] for row in found["rows"]] == ["shm", "memory-limit"]
    assert "- Interrupted: only a part of what was asked for was measured." in (out / "sweep.md").read_text()
    assert "N=2" in done.stdout
    assert not history.exists() or not [*history.iterdir()]


def test_backends_of_another_operation_are_refused() -> None:
    with pytest.raises(UsageError, match=r"backend ps-shm cannot be measured for all_reduce on one host; there"):
        SweepConfig(backends="ps-shm")
    with pytest.raises(UsageError, match=r"backend nccl cannot be measured for broadcast on one host; there are shm"):
        SweepConfig(op="broadcast", backends="nccl")
    with pytest.raises(UsageError, match=r"backend gloo cannot be measured for push_pull on one host; there"):
        SweepConfig(op="push_pull", backends="gloo")


@pytest.mark.parametrize("size", [0, 1, 100, 3 * BLOCK + 5])
@pytest.mark.parametrize("broken", [0, 2])
def test_the_check_of_a_round_counts_what_is_wrong(size: int, broken: int) -> None:
    peer = SimpleNamespace(array=np.zeros(size, np.float32), parameters=np.ones(size, np.float32))

    def push_pull() -> None:  # of four ranks, this one has rank 2
        peer.parameters -= np.float32(RATE) * (peer.array - np.float32(0.5))
        peer.parameters[size - broken :] += 1

    peer.push_pull = push_pull
    assert wrong_parameters(peer, 2, 4) == min(broken, size)
