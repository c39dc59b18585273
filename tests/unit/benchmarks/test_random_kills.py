"""Kills without a plan: what is told of them, and what counts as growth."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import random_kills as kills
from benchmarks.faults.killing import has_begun, named
from benchmarks.faults.random_kills import NRANKS, Result, faults_of, grows, random_kills
from benchmarks.records.faults import Recovery, Usage
from benchmarks.verbs import faults as verb
from benchmarks.verbs.faults import FaultsConfig, faults
from common.errors import GradSyncError, UsageError
from common.system.process import JOINED_VARIABLE


def samples(*memory: float, descriptors: int = 20, threads: int = 9) -> list[list[Usage]]:
    return [[Usage("launcher", 30.0, 12, 1), Usage("rank 0", each, descriptors, threads)] for each in memory]


def test_what_stays_does_not_grow() -> None:
    assert list(grows(samples(100.0, 101.0, 100.0, 102.0))) == []
    busy = samples(100.0, descriptors=22)  # a commit is being written
    assert list(grows([*samples(100.0, 101.0), *busy, *samples(100.0), *busy, *samples(100.0)])) == []
    assert list(grows([])) == []


def test_memory_descriptors_and_threads_that_grow_are_named() -> None:
    later = samples(140.0, 141.0, descriptors=21, threads=10)
    assert list(grows([*samples(100.0, 101.0, 140.0, 140.0), *later])) == [
        "memory_mb of rank 0 grew from 100 to 140",
        "descriptors of rank 0 grew from 20 to 21",
        "threads of rank 0 grew from 9 to 10",
    ]


def test_what_was_missing_once_is_no_growth() -> None:
    def of_threads(count: int) -> list[Usage]:
        return [Usage("server 0", 100.0, 20, count)]

    assert list(grows([*map(of_threads, (18, 19, 19, 19, 18, 19, 19, 19, 19))])) == []


@pytest.mark.parametrize(
    ("command", "who"),
    [
        ("python -m ps.trainer --nranks 2 --rank 1", "rank 1"),
        ("python -m collective.trainer --rank 0", "rank 0"),
        ("python -m ps.server --shard 1/2", "server 1"),
        ("python -m ps.server --port 0", "server 0"),
        ("python -I -S -c import common.launch.guard", ""),
    ],
)
def test_processes_are_known_by_their_commands(command: str, who: str) -> None:
    assert named(command.split()) == who


@pytest.mark.parametrize("flags", [[], ["--address-file"]])
def test_a_process_has_begun_when_it_has_told_its_launcher(flags: list[str], tmp_path: Path) -> None:
    """A rank, that it joins; a server, where it listens."""
    told = tmp_path / "told"

    class Started:
        def cmdline(self) -> list[str]:
            return ["python", *flags, *([str(told)] if flags else [])]

        def environ(self) -> dict[str, str]:
            return {JOINED_VARIABLE: str(tmp_path / "none" if flags else told)}

    process: Any = Started()
    assert not has_begun(process)
    told.write_text("2\n")
    assert has_begun(process)


def test_what_came_of_kills_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def some(scheme: str, nranks: int, count: int, seed: int, tell: object) -> Result:
        made.append((scheme, nranks, count, seed))
        why_not = "" if nranks == 2 else "rank 1 of 4: other bits"
        return Result(count, count - bool(why_not), [Recovery(2.0, 1.5), Recovery(4.0, 3.0, 1, True)], why_not=why_not)

    monkeypatch.setattr(verb, "random_kills", some)
    monkeypatch.setattr(verb, "soak", lambda *_, **__: Result(19, 1, usage=samples(1.0)))
    assert faults(FaultsConfig(out=tmp_path, random_kills=12, soak=10_000, schemes="ps", kill_seed=7)) == 1
    assert made == [("ps", nranks, 6, 7) for nranks in NRANKS]
    told = capsys.readouterr().out
    assert (
        "row 1: ps (shm+tcp+grpc+tcp on 2 hosts): random kills, 2 ranks: the bits of an undisturbed job: 6 of 6, "
        "complete again after p50 3.00 s, max 4.00 s; 0.75 and 1.00 s beside the new process's start\n"
    ) in told
    assert "random kills, 4 ranks: the bits of an undisturbed job: 5 of 6" in told
    assert (
        "row 19: ps (shm): 10,000 steps, 19 kills: the bits of an undisturbed job, and no process grows: 1 of 1" in told
    )
    assert "rank 1 of 4: other bits" in (tmp_path / "faults.md").read_text()


def test_a_job_that_fails_by_itself_ends_the_search_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        begun, in_the_midst = 0.0, True

        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> Ended:
            return self

        def __exit__(self, *_: object) -> None: ...
        def until(self, *_: object) -> None: ...
        def kill(self, *_: object, **__: object) -> str:
            return ""

        def digest(self) -> str:
            return "exit code 2: collective.run: UsageError: no"

    monkeypatch.setattr(kills, "Killing", Ended)
    monkeypatch.setattr(kills, "undisturbed", lambda *_: ("the digest", 3.0))
    with pytest.raises(
        GradSyncError, match=r"a job of ring \(shm\) that lost nobody ended otherwise: exit code 2: coll"
    ):
        random_kills("ring", 2, 1, 0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"soak": 1000, "kill_every": 0}, "--kill-every at least 1"),
        ({"soak": 1000, "mtbf": -1.0}, "--mtbf must be a number of seconds"),
        ({"mtbf": 30.0}, "--mtbf needs --soak"),
    ],
)
def test_flags_that_cannot_be(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        FaultsConfig(**flags)


@pytest.mark.parametrize("mtbf", [0.0, 0.05])
def test_a_soak_kills_until_its_end(mtbf: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait takes a moment and 25 steps."""

    class Soaked:
        def __init__(self, *_: object, restarts: int = 0) -> None:
            self.step, self.begun, self.recoveries = 0, time.monotonic(), [Recovery(1.0, 0.5, 0, True)]

        def __enter__(self) -> Soaked:
            return self

        def __exit__(self, *_: object) -> None: ...
        def usage(self) -> list[Usage]:
            return samples(30.0)[0]

        @property
        def over(self) -> bool:
            return self.step >= 200

        def until(self, condition: Callable[[], bool], _: str) -> None:
            while not (condition() or self.over):
                self.step += 25
                time.sleep(0.02)

        def kill(self, choose: Callable[[list[str]], str]) -> str:
            return choose(["rank 1"])

        def digest(self) -> str:
            return "the digest"

    monkeypatch.setattr(kills, "Killing", Soaked)
    told: list[str] = []
    found = kills.soak("ring", 200, 50, 3, told.append, mtbf=mtbf)
    assert (found.kept, found.why_not) == (1, "")
    assert found.kills == len(told) == len(found.usage)
    assert found.kills == 3 if not mtbf else 1 <= found.kills <= 8
    assert told[0].startswith("ring: rank 1 killed after step ")


@pytest.mark.parametrize(
    ("recovery", "found"),
    [
        (Recovery(9.0, 1.0), ["all were started again"]),
        (Recovery(3.0, 1.5, 1, True), []),
        (Recovery(1.0, 0.5, 0, False), ["another one lost its process"]),
        (Recovery(1.0, 0.5, 2, True), ["2 steps were made again"]),
        (Recovery(4.0, 0.5, 0, True), ["the others waited 3.5 s beside the new process's start and imports"]),
    ],
)
def test_where_the_others_go_on_more_is_promised(recovery: Recovery, found: list[str]) -> None:
    assert list(faults_of(recovery, needed=True)) == found


def test_where_they_need_not_nothing_is_promised_but_the_bits() -> None:
    assert list(faults_of(Recovery(9.0, 1.0))) == []


@pytest.mark.processes
@pytest.mark.longest
def test_a_real_random_kill_ends_in_the_same_bits() -> None:
    pytest.importorskip("paddle")
    told: list[str] = []
    found = random_kills("ring", 2, 1, random.randrange(1000), told.append)
    assert (found.kills, found.kept, found.why_not) == (1, 1, ""), told
