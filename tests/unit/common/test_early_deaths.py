"""What a launcher does when a rank dies before the first group of all is complete."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.launch.job import Job
from common.launch.replacing import Replacing
from common.launch.restarts import Life, RestartFlags, supervise
from common.system.next_epoch import Word, word_in
from tests.support.jobs import PAUSE, start
from tests.support.mended import Mended, until

Run = Callable[..., None]

FIRST = "unix-abstract:first"


class Starting(Mended):
    """A job of three ranks, which wait for each other at their first meeting; rank 1 has not come yet."""

    def __init__(self, job: Job) -> None:
        self.job, self.places, self.now = job, [""] * 0, 0.0
        self.replacing = Replacing(job, self.start, 30.0, first=FIRST, clock=lambda: self.now)
        for rank in range(3):
            start(job, rank, PAUSE)
        self.note(0, "3")
        self.note(2, "3")


@pytest.fixture
def starting() -> Run:
    """Runs something with such a job, of two restarts, once."""

    def run(what: Callable[[Starting], None]) -> None:
        def live(life: Life) -> None:
            assert life.number == 0
            with Job(life=life, keeps=True, begins=True, patience=0.2) as job:
                what(Starting(job))

        supervise(RestartFlags(max_restarts=2), live, prog="collective.run")

    return run


def test_who_is_killed_before_it_has_joined_is_started_again_while_the_others_wait(
    starting: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def what(of: Starting) -> None:
        before = [of.rank(rank).process.pid for rank in (0, 2)]
        for number in (1, 2):
            of.kill(1)
            assert of.look()
            assert of.places == [FIRST] * number
            said = f"; rank 1 is started again (restart {number} of 2), the others wait\n"
            assert said in capsys.readouterr().err
            assert not of.look()
        for rank in range(3):
            of.note(rank, *["3"] * (rank == 1), "complete")
        of.job.life.look(of.job.children)
        assert "recovered: the group is complete, 0 steps replayed, " in capsys.readouterr().err
        assert of.job.life.number == 0  # it is their first group
        assert [of.rank(rank).process.pid for rank in (0, 2)] == before

    starting(what)
    assert "complete after 2 restarts (2 of a part, 0 steps replayed), which took " in capsys.readouterr().err


def test_who_is_killed_as_it_joins_is_started_again_likewise_once_the_others_would_have_heard(starting: Run) -> None:
    def what(of: Starting) -> None:
        of.note(1, "3")
        of.kill(1)
        assert of.look()
        assert not of.places
        assert of.look()
        assert of.places == [FIRST]
        assert of.job.life.number == 0

    starting(what)


@pytest.mark.parametrize("joined", [True, False], ids=["joins", "has not begun to"])
def test_if_they_hear_of_it_all_that_live_begin_again_in_the_next_epoch(joined: bool, starting: Run) -> None:
    def what(of: Starting) -> None:
        before = [of.rank(rank).process.pid for rank in range(3)]
        of.note(1, "3")
        if not joined:
            of.rank(2).joined.unlink()
        of.kill(1)
        of.wait(0)
        looked = 0
        while not of.places:
            assert of.look()
            looked += 1
        assert looked == (4 if joined else 1)  # on its way into that group, rank 2 may hear of it; or else is told
        assert word_in(of.job.word_file) == (None if joined else Word(1, "", of.job.secret))
        assert len(of.places) == (2 if joined else 1)
        assert FIRST not in of.places
        assert of.job.life.number == 1
        assert of.rank(0).process.pid == before[0]
        assert (of.rank(2).process.pid == before[2]) is not joined

    starting(what)


def test_who_ends_by_itself_before_the_group_is_complete_is_not_started_again_while_others_wait(starting: Run) -> None:
    def what(of: Starting) -> None:
        of.kill(1)
        of.rank(1).process.returncode = 1
        until(lambda: not of.look())  # so that it is told of
        assert of.job.failure().cause.startswith("rank 1 ended with exit code 1")
        assert not of.places

    starting(what)
