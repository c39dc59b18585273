"""When a launcher replaces a rank, and when it starts all again: by processes that only sleep, and notes by hand."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from common.errors import RecoveryFailed
from common.launch.child import ProcessFailed
from common.launch.job import Job
from common.launch.restarts import Life, RestartFlags, supervise
from common.system.next_epoch import word_in
from tests.support.mended import Mended, until


@pytest.fixture
def mended() -> Callable[..., None]:
    """Runs something with such a job, of two restarts."""

    def run(what: Callable[[Mended], None], most: int = 2) -> None:
        def live(life: Life) -> None:
            with Job(life=life, keeps=True, patience=0.2) as job:
                what(Mended(job))

        supervise(RestartFlags(max_restarts=most), live, prog="collective.run")

    return run


Run = Callable[..., None]


def test_the_dead_is_started_again_and_the_others_are_let_go_on_once_it_joins(
    mended: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def what(of: Mended) -> None:
        assert not of.look()
        secret, before = of.job.secret, {of.rank(r).process.pid for r in (0, 2)}
        of.kill(1)
        assert of.look()  # the others have not noticed yet
        of.wait(0)
        assert of.look()
        assert not of.places
        of.wait(2)
        assert of.look()
        assert len(of.places) == 1
        assert of.look()
        assert word_in(of.job.word_file) is None  # it may prepare for long: nobody's patience must end meanwhile
        of.note(1, "3")
        assert of.look()
        word = word_in(of.job.word_file)
        assert word
        assert (word.epoch, word.rendezvous, word.secret) == (1, of.places[0], of.job.secret)
        assert word.secret != secret
        of.note(0, "goes on 1 4 5")
        of.note(1, "goes on 1 4 4")
        assert of.look()
        assert "recovered" not in capsys.readouterr().err
        of.note(2, "goes on 1 4 4")
        assert of.look()
        assert "recovered: all go on after step 4, 1 step replayed" in capsys.readouterr().err
        assert not of.look()
        assert {of.rank(r).process.pid for r in (0, 2)} == before
        of.kill(0)  # and once more
        of.wait(1, 2, epoch=2)
        assert of.look()
        assert "rank 0 is started again (restart 2 of 2)" in capsys.readouterr().err

    mended(what)


def test_who_has_stalled_is_killed_before_its_place_is_given_away(
    mended: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def what(of: Mended) -> None:
        frozen = of.rank(1).process
        os.kill(frozen.pid, signal.SIGSTOP)
        until(lambda: of.rank(1).is_frozen())
        of.note(0, "waits 1 PeerStalled: rank 1 did not take part")
        of.wait(2)
        assert of.look()
        assert frozen.returncode == -signal.SIGKILL
        assert of.look()
        text = "rank 1 was frozen or silent; rank 0 says: PeerStalled: rank 1 did not take part, "
        assert text in capsys.readouterr().err
        assert len(of.places) == 1

    mended(what)


def test_who_is_busy_is_waited_for(mended: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def what(of: Mended) -> None:
        of.replacing.wait_limit = 600.0
        of.kill(1)
        of.wait(0)
        assert of.look()
        for _ in range(3):
            of.now += 40
            assert of.look()
        assert capsys.readouterr().err.splitlines() == [
            "collective.run: rank 2 is alive, but busy; the others wait for as long as --wait-limit says"
        ]
        before = of.rank(2).process.pid
        of.wait(2)
        assert of.look()
        assert "; rank 1 is started again" in capsys.readouterr().err
        assert of.rank(2).process.pid == before

    mended(what)


def test_who_does_not_notice_in_time_is_replaced_too(mended: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def what(of: Mended) -> None:
        of.kill(1)
        of.wait(0)
        assert of.look()
        of.now += 30
        assert of.look()
        assert of.look()
        assert "rank 1 was killed by SIGKILL" in (told := capsys.readouterr().err)
        assert "rank 1 and rank 2 are started again" in told

    mended(what)


@pytest.mark.parametrize("how", ["keeps nothing", "all died", "another ended well", "ended with a usage error"])
def test_where_a_rank_cannot_be_replaced_all_are_started_again(how: str, mended: Run) -> None:
    def what(of: Mended) -> None:
        of.kill(1)
        if how == "keeps nothing":
            os.ftruncate(of.job.kept["rank 2"], 0)
            of.wait(0)
        elif how == "all died":
            of.kill(0)
            of.kill(2)
        elif how == "another ended well":
            of.kill(2)
            of.rank(2).process.returncode = 0
            of.wait(0)
        else:
            of.rank(1).process.returncode = 2
            of.wait(0, 2)
        assert not of.look()
        assert not of.look()
        assert not of.places

    mended(what)


@pytest.mark.parametrize("who", [0, 1])
def test_a_second_death_once_the_others_have_the_word_starts_all_again(who: int, mended: Run) -> None:
    def what(of: Mended) -> None:
        of.replace_rank_1()
        of.kill(who)
        assert not of.look()

    mended(what)


def test_the_death_of_one_that_waits_starts_all_again(mended: Run) -> None:
    def what(of: Mended) -> None:
        of.kill(1)
        of.wait(0, 2)
        assert of.look()
        of.kill(2)
        assert not of.look()

    mended(what)


def test_who_dies_before_it_joins_is_started_once_more(mended: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def what(of: Mended) -> None:
        of.kill(1)
        of.wait(0, 2)
        assert of.look()
        secret = of.job.secret
        of.kill(1)
        assert of.look()
        assert "rank 1 is started again (restart 2 of 2), the others go on" in capsys.readouterr().err
        assert len(of.places) == 2
        of.note(1, "3")
        assert of.look()
        assert (word := word_in(of.job.word_file))
        assert (word.epoch, word.rendezvous) == (2, of.places[1])
        assert word.secret != secret

    mended(what)


def test_who_freezes_before_it_joins_is_killed_in_time_and_started_once_more(
    mended: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def what(of: Mended) -> None:
        of.kill(1)
        of.wait(0, 2)
        assert of.look()
        frozen = of.rank(1).process
        for number, is_frozen in ((signal.SIGSTOP, True), (signal.SIGCONT, False), (signal.SIGSTOP, True)):
            assert of.look()
            of.now += 25  # each time less than it has
            os.kill(frozen.pid, number)
            until(lambda is_frozen=is_frozen: of.rank(1).is_frozen() == is_frozen)
            assert of.look()
        assert frozen.poll() is None
        of.now += 30
        assert of.look()
        assert frozen.returncode == -signal.SIGKILL
        told = capsys.readouterr().err
        assert "rank 1 was frozen for 30 s before it joined, " in told
        assert "; rank 1 is started again (restart 2 of 2), the others go on" in told
        assert len(of.places) == 2

    mended(what)


def test_a_group_that_fails_again_before_all_go_on_is_no_cure(mended: Run) -> None:
    def what(of: Mended) -> None:
        of.kill(1)
        of.wait(0, 2)
        assert of.look()
        of.wait(0, epoch=2)
        assert of.look(), "who has died may be seen in a moment"
        with pytest.raises(ProcessFailed, match="rank 0 says: PeerLost: rank 1 died"):
            of.look()

    mended(what)


def test_who_is_killed_again_is_named_though_the_others_hear_of_it_first(mended: Run) -> None:
    def what(of: Mended) -> None:
        of.replace_rank_1()
        of.wait(0, epoch=2)
        assert of.look()
        of.kill(1)
        assert not of.look(), "the job tells who it was"
        assert of.job.failure().cause == "rank 1 was killed by SIGKILL"

    mended(what)


@pytest.mark.parametrize("is_seen", [True, False])
def test_who_dies_when_another_has_ended_has_a_moment_to_be_seen(is_seen: bool, mended: Run) -> None:
    def what(of: Mended) -> None:
        of.kill(2)
        of.rank(2).process.returncode = 0
        of.wait(0)
        assert of.look()
        if is_seen:
            of.kill(1)
            assert not of.look(), "the job tells who it was"
            assert of.job.failure().cause == "rank 1 was killed by SIGKILL"
            return
        with pytest.raises(ProcessFailed, match=r"^rank 0 says: PeerLost: rank 1 died"):
            of.look()

    mended(what)


def test_no_rank_is_replaced_when_no_restart_is_left(mended: Run) -> None:
    def what(of: Mended) -> None:
        for epoch in (1, 2):
            of.kill(1)
            of.wait(0, 2, epoch=epoch)
            of.look()
            of.note(1, "3", f"goes on {epoch} 1 1")
            for rank in (0, 2):
                of.note(rank, f"goes on {epoch} 1 1")
            of.look()

    with pytest.raises(RecoveryFailed, match="1 restart did not help"):
        mended(what, most=1)
