"""When launchers of two hosts replace a rank, and when they start all again: by processes that only sleep, notes by
hand, and a stream without a network."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import RecoveryFailed
from common.launch.child import ProcessFailed
from common.launch.crew_messages import Order, send
from common.launch.hosts import Node, Place
from common.system.next_epoch import Word
from tests.support.two_hosts import PLACE, Company, Two, on_two

LIMIT_S = 20.0


@pytest.mark.parametrize("dead", [0, 3])
def test_the_dead_is_started_again_on_its_host_and_the_others_are_let_go_on_once_it_joins(
    dead: int, capsys: pytest.CaptureFixture[str]
) -> None:
    living = [rank for rank in range(4) if rank != dead]

    def what(of: Two) -> None:
        assert of.look() == (False, False)
        before = {of.rank(rank).process.pid for rank in living}
        of.kill(dead)
        assert of.look()[dead // 2]
        of.wait(*living[:2])
        assert of.look() == (True, True)
        assert not of.places  # one has not noticed yet
        of.wait(living[2])
        assert of.look() == (True, True)
        assert of.places == [f"{dead} {PLACE}"]
        told = capsys.readouterr().err
        for host in (0, 1):
            assert f"host {host}: rank {dead} was killed by SIGKILL, " in told
        assert told.count(f"; rank {dead} is started again (restart 1 of 2), the others go on") == 2
        assert of.look() == (True, True)
        assert of.words() == [None, None]
        of.note(dead, "4")
        assert of.look() == (True, True)
        assert of.words() == [Word(1, PLACE, "")] * 2
        for rank in living:
            of.note(rank, "goes on 1 4 5")
        assert of.look() == (True, True)
        assert "recovered" not in capsys.readouterr().err
        of.note(dead, "goes on 1 4 4")
        of.look()
        assert of.look() == (False, False)
        assert capsys.readouterr().err.count("recovered: all go on after step 4, 1 step replayed") == 2
        assert {of.rank(rank).process.pid for rank in living} == before
        of.kill(3 - dead)  # and once more
        of.wait(*({0, 1, 2, 3} - {3 - dead}), epoch=2)
        of.look()
        assert of.look() == (True, True)
        assert capsys.readouterr().err.count(f"rank {3 - dead} is started again (restart 2 of 2)") == 2

    on_two(what)


def test_a_rank_of_another_host_is_started_once_the_servers_listen() -> None:
    def what(of: Two) -> None:
        of.kill(3)
        of.wait(0, 1, 2)
        server = of.jobs[0].children[-1]
        with server.joined.open("a") as out:
            out.write("waits 1 PeerLost: rank 3 died\n")
        assert of.look() == (True, True)
        assert of.words() == [Word(1, "", "")] * 2  # by which the server goes on
        assert of.look() == (True, True)
        assert not of.places
        (of.jobs[0].scratch / "server-0").write_text("10.0.0.1:8600\n")
        assert of.look() == (True, True)
        assert of.places == [f"3 {PLACE}"]
        of.note(3, "4")
        of.look()
        assert of.words() == [Word(1, PLACE, "")] * 2
        for rank in range(4):
            of.note(rank, "goes on 1 4 4")
        with server.joined.open("a") as out:
            out.write("goes on 1 4 4\n")
        of.look()
        assert of.look() == (False, False)

    on_two(what, served=True)


def test_who_has_stalled_on_another_host_is_killed_there_before_its_place_is_given_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def what(of: Two) -> None:
        frozen = of.rank(3).process
        os.kill(frozen.pid, signal.SIGSTOP)
        until(of.rank(3).is_frozen)
        of.wait(0, 1, 2)
        assert of.look() == (True, True)
        assert frozen.returncode == -signal.SIGKILL
        assert of.look() == (True, True)
        assert of.places == [f"3 {PLACE}"]
        assert capsys.readouterr().err.count("rank 3 was frozen or silent; rank 0 says: PeerLost: rank 3 died") == 2

    on_two(what)


def test_a_job_does_not_end_while_a_hosts_only_rank_is_being_replaced() -> None:
    """It has none between the order to end what the dead has left and the one to start another."""

    def what(of: Two) -> None:
        job, looks = of.jobs[1], [True, True, False]
        of.kill(3)
        job.end(of.rank(3).process)
        of.kill(2)
        job.end(of.rank(2).process)
        job.mends = lambda: looks.pop(0)
        job.wait()
        assert not looks

    on_two(what)


def test_a_rank_that_dies_while_nothing_is_found_to_be_mended_is_looked_at_again() -> None:
    def what(of: Two) -> None:
        job, asked = of.jobs[1], 0

        def mends() -> bool:
            nonlocal asked
            asked += 1
            if asked == 1:
                of.kill(3)
            if asked == 2:
                job.end(of.rank(3).process)
                of.end(2)
            return asked == 2

        job.mends = mends
        job.wait()
        assert asked == 3

    on_two(what)


def test_a_host_whose_ranks_have_ended_waits_for_those_of_the_other() -> None:
    def what(of: Two) -> None:
        for rank in (0, 1):
            of.end(rank)
        assert of.look() == (True, False)
        for rank in (2, 3):
            of.end(rank)
        assert of.second.look()
        assert not of.first.look()
        assert not of.second.look()

    on_two(what)


@pytest.mark.parametrize("last", [0, 2])
def test_a_rank_that_dies_when_those_of_the_other_host_have_ended_is_no_loss(last: int) -> None:
    def what(of: Two) -> None:
        for rank in {0, 1, 2, 3} - {last}:
            of.end(rank)
        assert of.look()[1 - last // 2]
        of.kill(last)
        of.now += 1.0
        of.second.look()
        of.first.look()
        of.second.look()
        launchers = of.first, of.second
        assert not launchers[last // 2].look()  # as of any failure
        of.now += of.jobs[0].settle
        with pytest.raises(ProcessFailed, match=f"^rank {last} was killed by SIGKILL$"):
            launchers[1 - last // 2].look()

    on_two(what)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_lost_when_the_other_has_ended_is_a_failure(lost: int) -> None:
    def what(of: Two) -> None:
        here = 1 - lost
        for rank in (2 * here, 2 * here + 1):
            of.end(rank)
        assert of.look()[here]
        of.near.gone = of.far.gone = "the other launcher is gone"
        of.now += 1.0
        assert (of.first, of.second)[here].look()
        of.now += of.jobs[0].settle
        with pytest.raises(ProcessFailed, match=r"^the other launcher is gone$"):
            (of.first, of.second)[here].look()

    on_two(what)


def test_the_last_word_of_a_launcher_that_ends_is_heard() -> None:
    def what(of: Two) -> None:
        for rank in range(4):
            of.end(rank)
        of.now += 1.0
        assert of.second.look()
        assert not of.first.look()
        of.far.gone = "the launcher of host 0 is gone"
        assert not of.second.look()

    on_two(what)


@pytest.mark.parametrize("how", ["keeps nothing", "ended well", "ended with a usage error"])
def test_where_a_rank_of_another_host_cannot_be_replaced_all_are_started_again(how: str) -> None:
    def what(of: Two) -> None:
        of.kill(3)
        if how == "keeps nothing":
            os.ftruncate(of.jobs[1].kept["rank 3"], 0)
        else:
            of.rank(3).process.returncode = 0 if how == "ended well" else 2
        of.wait(0, 1, 2)
        of.now += 1.0
        of.second.look()
        if how == "ended well":
            assert of.first.look(), "who has died may be seen in a moment"
            of.now += 1.0
        with pytest.raises(ProcessFailed, match=r"rank 0 says|rank 3 "):
            of.first.look()
        if how == "ended well":
            with pytest.raises(ProcessFailed, match="rank 2 says: PeerLost: rank 3 died"):
                of.second.look()
        else:
            assert not of.second.look()
        assert not of.places

    on_two(what)


def test_whose_launcher_is_gone_is_not_waited_for() -> None:
    def what(of: Two) -> None:
        of.loses(3)
        of.near.gone = "the launcher of host 1 is gone"
        with pytest.raises(ProcessFailed, match=r"^the launcher of host 1 is gone$"):
            of.first.look()

    on_two(what)


def test_where_the_first_launcher_is_gone_the_other_starts_all_again() -> None:
    def what(of: Two) -> None:
        of.loses(0)
        of.far.gone = "the launcher of host 0 is gone"
        with pytest.raises(ProcessFailed, match=r"^the launcher of host 0 is gone$"):
            of.second.look()
        with pytest.raises(ProcessFailed, match="rank 1 says"):  # it hears that the other gave up
            of.first.look()

    on_two(what)


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_starts_all_again_is_followed_by_the_other(host: int) -> None:
    def what(of: Two) -> None:
        companies: Any = (of.near, of.far)
        company: Any = Company(companies[host])
        node = Node(host, 2, PLACE, ("a:6170", "b:6170"), launchers_meet=PLACE)
        Place(node, LIMIT_S, company=company).agree(1)
        other = (of.second, of.first)[host]
        of.now += 1.0
        assert other.look()
        of.now += of.jobs[0].settle
        with pytest.raises(ProcessFailed, match=r"^processes of another host have failed$"):
            other.look()

    on_two(what)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_lost_before_all_have_met_is_a_failure(lost: int) -> None:
    """Its ranks are not missed by others yet, which would wait for them in vain."""

    def what(of: Two) -> None:
        launcher = (of.second, of.first)[lost]
        of.rank(2 * (1 - lost)).joined.write_text("4\n")
        assert of.look() == (False, False)
        of.near.gone = of.far.gone = "the other launcher is gone"
        of.now += 1.0
        assert launcher.look()
        of.now += of.jobs[0].settle
        with pytest.raises(ProcessFailed, match=r"^the other launcher is gone$"):
            launcher.look()

    on_two(what)


def test_streams_that_end_while_nothing_is_wrong_are_no_failure() -> None:
    def what(of: Two) -> None:
        of.near.gone = of.far.gone = "it is gone"
        assert of.look() == (False, False)

    on_two(what)


def test_a_host_whose_ranks_have_not_noticed_hears_why_all_are_started_again() -> None:
    def what(of: Two) -> None:
        of.loses(0)
        of.note(0, "4")
        of.look()
        of.kill(1)
        assert not of.first.look()
        for rank in (2, 3):
            of.note(rank, "goes on 1 0 0")
        assert of.second.look()  # they may still say what they have met
        of.now += of.jobs[1].settle
        with pytest.raises(ProcessFailed, match=r"^rank 1 was killed by SIGKILL$") as failure:
            of.second.look()
        assert failure.value.by_signal

    on_two(what)


def test_no_rank_is_replaced_where_one_launcher_has_no_restart_left() -> None:
    with pytest.raises(RecoveryFailed, match="0 restart did not help"):
        on_two(lambda of: of.loses(3), most=(2, 0))


def test_orders_of_an_earlier_life_are_not_followed() -> None:
    def what(of: Two) -> None:
        send(of.near, Order(7, gave_up=True))
        assert of.look() == (False, False)

    on_two(what)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
