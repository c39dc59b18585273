"""The rounds of a sweep, with groups that only say what they would have measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.flags.sweep import SweepConfig
from benchmarks.netlab.hosts import OneHost
from benchmarks.operations.group import MeasuredGroup
from benchmarks.operations.groups import Groups
from benchmarks.operations.measured import Measured
from benchmarks.operations.rows import rows_of as typed_rows
from benchmarks.records.result_files import plain
from benchmarks.records.sweep import Waiting
from benchmarks.verbs.sweep import make_round, measure_waiting, waits
from common.errors import GradSyncError
from common.launch.job import Job
from common.system.process_memory import ProcessMemory
from tests.support.reporting import to_html, to_markdown, verdict
from tests.support.sweep_samples import results_of, sample


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
    for number in range(config.repetitions):
        make_round(there, mine, config, number, lambda _: None)
    if waits(config):
        measure_waiting(there, mine, config.late)
    return mine


def rows_of(*measured: Any) -> list[dict[str, Any]]:
    return [plain(row) for row in typed_rows(*measured)]


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
        Waiting("shm", 4, 2.0, 0.04),
        Waiting("tcp", 4, 2.0, 0.06),
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
    assert "Largest share of a core that a rank uses while it waits for one that is 2 s late" in text
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
    assert verdict(results_of(*rows))[-1] == (
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
