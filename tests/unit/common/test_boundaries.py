"""Step boundaries: which one ranks go back to, and what those who lack it are given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from collective.algorithms.ring import RingAlgorithm
from collective.group import Group
from collective.synchronizer import RingSynchronizer
from collective.transports.threads import connect_threads
from common.commit.kept_parts import KEPT_VARIABLE, make_kept, path_of
from common.commit.parts import Part
from common.errors import PeerLost, RecoveryFailed
from common.sync.boundaries import Boundaries, Boundary
from common.system.next_epoch import WORD_VARIABLE, Word
from common.system.process import JOB_SECRET_VARIABLE, JOINED_VARIABLE, RESTARTS_VARIABLE, restarts

Rank = Callable[[int, list[int], bool], Boundaries]


def part(*values: float) -> Part:
    return Part({"values": np.array(values)})


@pytest.fixture
def memory() -> Iterator[list[int]]:
    made = [make_kept() for _ in range(3)]
    yield made
    for descriptor in made:
        os.close(descriptor)


@pytest.fixture
def ranks(memory: list[int], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Boundaries]]:
    """Of three ranks that have kept the boundaries after these steps; whoever is replaced has lost what is common."""

    def ranks(*steps: list[int], replaced: int = -1) -> list[Boundaries]:
        found = []
        for rank, transport in enumerate(connect_threads(3)):
            monkeypatch.setenv(KEPT_VARIABLE, path_of(memory[rank]))
            group = Group(RingAlgorithm(transport), backend="threads")
            for life in range(2 if rank == replaced else 1):
                boundaries = Boundaries(RingSynchronizer(group, connect=lambda _, group=group: group), 5.0)
                for step in steps[rank] if life == 0 else ():
                    boundaries.keep(step, part(rank, step), part(step, step / 2, 7))
            found.append(boundaries)
        return found

    return ranks


def agreed(ranks: list[Boundaries]) -> list[Any]:
    """What each gets or raises."""
    out: list[Any] = [None] * len(ranks)

    def agree(rank: int) -> None:
        try:
            out[rank] = ranks[rank].agree()
        except Exception as exc:
            out[rank] = exc

    threads = [Thread(target=agree, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return out


@pytest.mark.parametrize("replaced", [-1, 0, 1, 2])
@pytest.mark.parametrize(
    ("steps", "to"),
    [
        (([3, 4], [3, 4], [3, 4]), 4),
        (([3, 4], [4, 5], [4, 5]), 4),
        (([4, 5], [3, 4], [4]), 4),
        (([0], [0, 1], [0]), 0),
        (([0, 1], [1], [1, 2]), 1),
    ],
)
def test_all_go_back_to_the_newest_that_all_have(
    steps: tuple[list[int], ...], to: int, replaced: int, ranks: Callable[..., list[Boundaries]]
) -> None:
    for rank, boundary in enumerate(agreed(ranks(*steps, replaced=replaced))):
        assert isinstance(boundary, Boundary), boundary
        assert boundary.step == to
        assert boundary.own.arrays["values"].tolist() == [rank, to]
        assert boundary.common.arrays["values"].tolist() == [to, to / 2, 7]


def test_once_back_they_can_go_back_to_it_again(ranks: Callable[..., list[Boundaries]]) -> None:
    mine = ranks([3, 4], [4, 5], [4, 5], replaced=1)
    for _ in range(2):
        assert [boundary.step for boundary in agreed(mine)] == [4, 4, 4]


@pytest.mark.parametrize("steps", [([1, 2], [3, 4], [2, 3]), ([1, 2], [1, 2], [3])])
def test_without_one_that_all_have_nobody_goes_on(
    steps: tuple[list[int], ...], ranks: Callable[..., list[Boundaries]]
) -> None:
    for error in agreed(ranks(*steps)):
        assert isinstance(error, RecoveryFailed)
        assert "no step boundary that all ranks have (rank 0: [1, 2]; rank 1" in str(error)


def test_a_first_group_has_nothing_to_agree_on(ranks: Callable[..., list[Boundaries]]) -> None:
    assert agreed(ranks([], [], [])) == [None, None, None]


def test_who_has_no_boundary_or_no_launcher_fails_as_ever(
    monkeypatch: pytest.MonkeyPatch, ranks: Callable[..., list[Boundaries]]
) -> None:
    lost = PeerLost("rank 1 died")
    first, *_ = ranks([], [], [])
    monkeypatch.delenv(KEPT_VARIABLE)
    transport = connect_threads(1)[0]
    group = Group(RingAlgorithm(transport), backend="threads")
    alone = Boundaries(RingSynchronizer(group, connect=lambda _: group), 5.0)
    alone.keep(1, part(1), part(1))
    assert not alone.are_kept
    for each in (first, alone):
        with pytest.raises(PeerLost) as caught:
            each.leave(lost)
        assert caught.value is lost


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {RESTARTS_VARIABLE: "0", JOB_SECRET_VARIABLE: "", WORD_VARIABLE: tmp_path / "word"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv(JOINED_VARIABLE, str(tmp_path / "joined"))
    return tmp_path


def test_who_outlives_another_waits_for_the_word_and_is_of_its_epoch(
    launcher: Path, ranks: Callable[..., list[Boundaries]]
) -> None:
    first, *_ = ranks([3, 4], [], [])
    first.leave(PeerLost("rank 1 died,\nor so"))
    assert not (launcher / "joined").exists()  # a program's body may end it yet
    Word(1, "unix-abstract:there", "ab" * 32).give(launcher / "word")
    met: list[str] = []
    first._synchronizer._connect = lambda place: (
        met.append(place)
        or Group(  # type: ignore[attr-defined]
            RingAlgorithm(connect_threads(1)[0]), backend="threads"
        )
    )
    first.rejoin()
    assert (launcher / "joined").read_text() == "waits 1 PeerLost: rank 1 died, or so\n"
    assert met == ["unix-abstract:there"]
    assert restarts() == 1
    assert os.environ[JOB_SECRET_VARIABLE] == "ab" * 32
    first.gone_back(3)
    assert (launcher / "joined").read_text().splitlines()[-1] == "goes on 1 3 4"


def test_a_launcher_that_says_nothing_is_not_waited_for_for_ever(
    launcher: Path, ranks: Callable[..., list[Boundaries]]
) -> None:
    first, *_ = ranks([3, 4], [], [])
    Word(0, "unix-abstract:old", "").give(launcher / "word")  # of this epoch: not a new one
    first._wait_limit = 0.02
    with pytest.raises(RecoveryFailed, match=r"gave no word to go on within 0.02 s \(--wait-limit\)"):
        first.rejoin()
