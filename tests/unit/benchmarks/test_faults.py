"""`faults`: the simulator keeps its promises and finds broken ones, and the table tells what was made and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.cases import CASES, Case, NotKept
from benchmarks.faults.simulated import PromiseBroken
from benchmarks.faults.simulator import simulate
from benchmarks.netlab.cluster import why_no_cluster
from benchmarks.verbs.faults import FaultsConfig, chosen, faults
from common.errors import UsageError
from ps.store.contributions import Contributions
from ps.store.step_state import StepState

SEEDS = 200
needs_cluster = pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster())


def test_seeds_keep_all_promises() -> None:
    found = [simulate(seed) for seed in range(SEEDS)]
    assert {each.mode for each in found} == {"sync", "ssp:1", "ssp:2", "async"}
    assert sum(each.refused for each in found) > SEEDS
    assert sum(each.kills for each in found) > SEEDS / 10


def test_a_seed_replays_exactly() -> None:
    first, second = ([], [])
    one, other = simulate(11, first.append), simulate(11, second.append)
    assert one == other
    assert first == second
    assert len(first) > 10
    assert simulate(12).history != one.history


def any_epoch(check: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rank, epoch, step, **more: check(self, rank, self.epoch, step, **more)


def never_owing(check: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rank, epoch, step, **_: check(self, rank, epoch, step, owing=True)


def any_commit(_: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rank, ending, *, ahead: None


def words_again(add: Callable[..., bool]) -> Callable[..., bool]:
    def without_check(self: Contributions, rank: int, step: int, bucket: int, start: int, data: Any) -> bool:
        behind = start < self.parts[bucket].start + self.delivered[rank][bucket]
        return False if behind else add(self, rank, step, bucket, start, data)

    return without_check


def another_order(words_of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, rank, *run: words_of(self, self.ranks[self.ranks.index(rank) - 1], *run)


@pytest.mark.parametrize(
    ("kind", "name", "broken"),
    [
        (StepState, "_check", any_epoch),
        (StepState, "_check", never_owing),
        (StepState, "_check_commit", any_commit),
        (Contributions, "add", words_again),
        (Contributions, "_words_of", another_order),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_store_without_one_of_its_guards_breaks_a_promise(
    kind: type, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, name, broken(getattr(kind, name)))
    with pytest.raises(PromiseBroken, match=r"^seed \d+: "):
        list(map(simulate, range(30)))


def case(row: int, scheme: str, run: Callable[[], Sequence[float]], *, needs_hosts: bool = False) -> Case:
    return Case(row, "a fault", scheme, "tcp", "a promise", run, needs_hosts)


def not_kept() -> Sequence[float]:
    raise NotKept("rank 0 did not | fail")


def test_what_was_made_and_kept_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = FaultsConfig(out=tmp_path, rows="1,21", times=3, seeds=5)
    cases = [case(1, "ps", lambda: [0.25, 0.5]), case(1, "ring", not_kept), case(4, "ps", not_kept)]
    assert faults(config, cases) == 1
    told = capsys.readouterr().out
    assert "row 1: ps (tcp): a fault: a promise: 3 of 3, noticed after 0.50 s at most\n" in told
    assert "row 1: ring (tcp): a fault: a promise: 0 of 3: rank 0 did not | fail\n" in told
    assert "row 21: ps (simulated): 5 seeds: each message once, and the bits of an undisturbed run: 1 of 1\n" in told
    of_the_ring = "the bits of an undisturbed job, or RecoveryFailed once restarts are used up"
    assert f"row 21: ring (simulated): 5 seeds: {of_the_ring}: 1 of 1\n" in told
    assert [line.split() for line in told.splitlines() if line.startswith(("ps ", "ring "))] == [
        ["ps", "4", "4", "0.38", "0.50", "-", "-", "-"],
        ["ring", "1", "4", "-", "-", "-", "-", "-"],
    ]
    written = json.loads((tmp_path / "faults.json").read_text())["outcomes"]
    assert [(each["row"], each["kept"], each["times"]) for each in written] == [
        (1, 3, 3),
        (1, 0, 3),
        (21, 1, 1),
        (21, 1, 1),
    ]
    page = (tmp_path / "faults.md").read_text()
    assert "| 21 | ring simulated | 5 seeds | " in page
    assert "| 1 | ps tcp | a fault | a promise | 3 of 3 | 0.38 | 0.50 | - | - |" in page
    assert r"- Not kept: ring, a fault: 0 of 3 times; first: rank 0 did not \| fail." in page
    assert (tmp_path / "faults.html").read_text().count(
        "<title>GradSync: what becomes of a job when something goes"
    ) == 1


def test_only_what_is_asked_for_is_made() -> None:
    cases = [case(1, "ring", not_kept), case(1, "ps", not_kept), case(2, "ring", not_kept)]
    assert chosen(FaultsConfig(rows="1", schemes="ring"), cases) == cases[:1]
    assert [each.row for each in chosen(FaultsConfig(), cases)] == [1, 1, 2, 21, 21]
    assert [each.scheme for each in chosen(FaultsConfig(rows="21", schemes="ring"), cases)] == ["ring"]


def test_a_seed_can_be_watched(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(FaultsConfig(seed=11)) == 0
    told = capsys.readouterr().out
    assert "taken: 17 rank 0 to 1, epoch 0 step 0: push 1 from 80 of 32\n" in told
    assert "\nps: seed 11: Simulated(mode=" in told
    assert " rank 0 joins group 0 in epoch 0\n" in told
    assert told.splitlines()[-1].startswith("ring: seed 11: SimulatedRing(end=")
    assert faults(FaultsConfig(seed=11, schemes="ring")) == 0
    assert "Simulated(mode=" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"rows": "3"}, "there is no row 3; there are 1, 2, 4, 5, 6, 7, 8, 21"),
        ({"schemes": "ps,tcp"}, "must be of ps and ring"),
        ({"times": 0}, "must be at least 1"),
    ],
)
def test_flags_that_cannot_be(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        FaultsConfig(**flags)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("scheme", "backend", "name"),
    [
        ("ps", "shm", "kill -9 of a rank"),
        pytest.param("ring", "tcp", "a rank frozen for 0.5 s", marks=pytest.mark.longest),
        pytest.param("ps", "tcp", "the server frozen", marks=pytest.mark.longest),
        pytest.param("ps", "shm", "a message lost", marks=pytest.mark.longest),
        pytest.param("ps", "grpc", "bits flip, with --insecure", marks=[pytest.mark.longest, needs_cluster]),
        pytest.param("ring", "tcp", "10 % of the packets twice", marks=[pytest.mark.longest, needs_cluster]),
    ],
)
def test_real_cases(scheme: str, backend: str, name: str) -> None:
    (found,) = [each for each in CASES if (each.scheme, each.backend, each.name) == (scheme, backend, name)]
    noticed = found.run()
    assert all(0 < seconds < 5 for seconds in noticed)
