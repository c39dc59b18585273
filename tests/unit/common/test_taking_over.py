"""What a launcher goes on with that has taken a job over: what the last one knew, and had begun."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import PeerError
from common.launch.child import ProcessFailed
from common.launch.job import Job
from common.launch.replacing import Replacing
from common.launch.restarts import Life, RestartFlags, Supervisor
from common.system.next_epoch import Word
from tests.support.jobs import PAUSE, start

CAUSE = ProcessFailed("rank 1 was killed by SIGKILL", 137, joined=True, by_signal=True)


class FakeJob:
    """What a keeper tells."""

    launcher, members, died_at = 7, {"rank 0": {}, "rank 1": {}}, 1.0

    def __init__(self, notes: Any = None) -> None:
        self.notes = notes

    def note(self, notes: Any) -> None:
        self.notes = notes


def supervisor(kept: FakeJob, *, epoch: int = 0) -> Supervisor:
    adoption: Any = SimpleNamespace(find=lambda: kept if kept.notes else None, begin=lambda **_: kept, command=("it",))
    return Supervisor(
        RestartFlags(max_restarts=2), "ps.run", lambda epoch: epoch, lambda: 5.0, epoch, adoption=adoption
    )


def adopted(first: Supervisor, kept: FakeJob, capsys: pytest.CaptureFixture[str]) -> Life:
    """As the next launcher sees it."""
    capsys.readouterr()
    life = supervisor(FakeJob(kept.notes))._adopted()
    assert life is not None
    assert life.supervisor
    for name in ("epoch", "causes", "parts", "_recent", "_failed_at", "_begun", "_mends", "_born"):
        assert getattr(life.supervisor, name) == getattr(first, name)
    line = capsys.readouterr().err
    assert line.startswith("ps.run: takes over the job of launcher 7, which died ")
    assert line.endswith(f" s ago: rank 0, rank 1 (epoch {first.epoch})\n")
    return life


def test_nothing_is_taken_over_where_nothing_is() -> None:
    assert supervisor(FakeJob())._adopted() is None


def test_the_epoch_and_what_was_counted_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    kept = FakeJob()
    first = supervisor(kept, epoch=3)
    life = first._next()
    life.beside()
    life.is_under_way()
    assert kept.notes["command"] == ("it",)
    second = adopted(first, kept, capsys)
    assert (second.number, second.is_mended, second.is_whole) == (3, False, True)
    assert life.replace(CAUSE, ["rank 1"])
    second = adopted(first, kept, capsys)
    assert (second.number, second.is_mended, second.is_whole) == (4, True, True)
    life.went_on(8, 1)
    second = adopted(first, kept, capsys)
    assert (second.number, second.is_mended, second.is_whole) == (4, False, True)
    life.ends()
    assert kept.notes is None


def test_a_group_that_was_not_complete_yet_is_told_of_by_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    kept = FakeJob()
    first = supervisor(kept)
    first._restart(CAUSE)
    life = first._next()
    life.beside()
    life.is_under_way()
    second = adopted(first, kept, capsys)
    assert (second.number, second.is_mended, second.is_whole) == (1, False, False)


@pytest.fixture
def job() -> Iterator[Job]:
    with Job(life=Life(2, is_mended=True, is_whole=True), keeps=True) as job:
        for rank in range(2):
            start(job, rank, PAUSE)
        yield job


def note(job: Job, *lines: str) -> None:
    for child in job.children:
        with child.joined.open("a") as out:
            out.writelines(f"{line}\n" for line in lines)


@pytest.mark.parametrize("word", [None, Word(1, "place", "s"), Word(2, "", "s")])
def test_all_are_started_again_where_the_last_launcher_had_not_given_its_word(job: Job, word: Word | None) -> None:
    if word:
        word.give(job.word_file)
    with pytest.raises(ProcessFailed, match=r"^the launcher died while it started others again$") as caught:
        Replacing(job, lambda *_: None, 30.0).look()
    assert caught.value.exit_code == PeerError.exit_code
    assert caught.value.joined


def test_with_its_word_all_are_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    Word(2, "place", "s").give(job.word_file)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(Life, "went_on", lambda _, *steps: told.append(steps))
    replacing = Replacing(job, lambda *_: None, 30.0)
    assert replacing.look()
    assert not told
    note(job, "goes on 2 8 9")
    assert replacing.look()
    assert told == [(8, 1)]
    assert not replacing.look()
