"""The simulation of a ring keeps its promises, plays a seed again exactly, and finds guards that were taken away."""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.faults.ring_simulator import simulate_ring
from benchmarks.faults.simulated import PromiseBroken
from collective.algorithms.ring import RingAlgorithm
from collective.call_tags import Tag
from common.commit import kept_parts
from common.launch.crew import CrewHere
from common.launch.replacing import Replacing
from common.launch.restarts import Supervisor
from common.sync.boundaries import Boundaries

SEEDS = 200
MOST = 150  # in which a guard that is missing is found


def test_seeds_keep_all_promises() -> None:
    found = [simulate_ring(seed) for seed in range(SEEDS)]
    assert {each.end for each in found} == {"complete", "ProcessFailed", "RecoveryFailed"}
    assert sum(each.end == "complete" for each in found) > SEEDS / 2
    assert sum(each.kills for each in found) > SEEDS / 2
    assert sum(each.freezes for each in found) > SEEDS / 20
    assert sum(each.recovered for each in found) > SEEDS / 10
    assert sum(each.restarted for each in found) > SEEDS / 10
    for way in ("doubled", "overtaken", "old"):
        assert sum(each.refused[way] for each in found) > 0, way


def test_a_seed_replays_exactly() -> None:
    first, second = ([], [])
    one, other = simulate_ring(11, first.append), simulate_ring(11, second.append)
    assert one == other
    assert first == second
    assert len(first) > 10
    assert simulate_ring(12).history != one.history


def test_whoever_freezes_sleeps_no_longer() -> None:
    """A freeze of 7.5 s is cut to half of the timeout while the first group meets, and so is the sleep."""
    lines: list[str] = []
    found = simulate_ring(36960, lines.append)
    assert any("is frozen for 2.5 s as it joins" in line for line in lines)
    assert (found.end, found.restarted) == ("complete", 0)


def test_nothing_is_left_of_a_seed() -> None:
    before = (dict(os.environ), threading.active_count(), len(os.listdir("/proc/self/fd")))
    for seed in range(20):
        simulate_ring(seed)
    assert (dict(os.environ), threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def changed(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The same function, with other words in it."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, old
    there: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n" + source.replace(old, new), vars(sys.modules[function.__module__]), there
    )
    return there[function.__name__]  # type: ignore[no-any-return]


def another_order(all_reduce: Callable[..., None]) -> Callable[..., None]:
    """Of summation: chunks are those of the array from its end."""

    def backwards(self: RingAlgorithm, flat: Any, *more: Any) -> None:
        turned = flat[::-1].copy()
        all_reduce(self, turned, *more)
        flat[...] = turned[::-1]

    return backwards


SHARED = "shared = set.intersection(*map(set, found))"
JOINED = 'elif all(rank.has_joined() for rank in new if rank.name.startswith("rank")):'
GUARDS = {
    "epochs of messages": (Tag, "check", "if got == self:", "if got[1:] == self[1:]:"),
    "the newest that all have": (Boundaries, "agree", SHARED, SHARED.replace("intersection", "union")),
    "one's own newest": (Boundaries, "agree", "step = max(shared)", "step = max(mine)"),
    "all have noticed": (Replacing, "_gather", "if missing:", "if False:"),
    "who is started has joined": (Replacing, "_go_on", JOINED, "else:"),
    "who has made nothing begins again": (Boundaries, "agree", "if beginning and not shared:", "if False:"),
    "and is waited for": (Boundaries, "leave", "self._kept and self._kept.at_beginning", "False"),
    "only while they wait": (CrewHere, "start_over", "and others_wait and all(map(died_early, dead))", ""),
    "the newer of two is kept": (kept_parts.KeptParts, "write", "min(range(SLOTS)", "max(range(SLOTS)"),
    "the word is given": (Replacing, "_give", "crew.give(word)", "pass"),
    "restarts are counted": (Supervisor, "_take_restart", "if len(self._recent) >= most:", "if False:"),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_without_one_of_its_guards_a_promise_is_broken(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, old, new = GUARDS[guard]
    monkeypatch.setattr(kind, name, changed(getattr(kind, name), old, new))
    is_found()


def test_another_order_of_summation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingAlgorithm, "all_reduce", another_order(RingAlgorithm.all_reduce))
    is_found()


def test_one_boundary_instead_of_two_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_parts, "SLOTS", 1)
    is_found()


def test_not_looking_at_what_was_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CrewHere, "has_kept", lambda self, child: False)
    is_found()


def is_found() -> None:
    with pytest.raises(PromiseBroken, match=r"^seed \d+: "):
        list(map(simulate_ring, range(MOST)))
