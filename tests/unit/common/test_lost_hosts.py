"""What launchers do when another host is lost: by processes that only sleep, notes by hand, and a stream without a
network."""

from __future__ import annotations

import time

import pytest

from common.commit.kept_parts import HOLDS, KeptParts, path_of
from common.errors import RecoveryFailed
from common.launch.child import ProcessFailed
from common.launch.job import Job
from common.launch.restarts import Life, RestartFlags, Supervisor, no_other_host
from common.system.next_epoch import Word
from tests.support.two_hosts import PLACE, Two, on_two


def life_of_a_newcomer() -> Life:
    return Life(1, supervisor=Supervisor(RestartFlags(max_restarts=2), "host 2", no_other_host, time.monotonic, 1))


def lose_the_second_host(of: Two) -> None:
    """Its launcher and its ranks, of which the first host has copies."""
    of.note(0, f"{HOLDS} 2")
    of.note(1, f"{HOLDS} 3")
    of.look()
    of.near.gone = "the launcher of host 1 is gone"
    of.kill(2)
    of.kill(3)
    of.wait(0, 1)
    of.now += 1.0


@pytest.mark.parametrize("served", [False, True])
def test_the_ranks_of_a_lost_host_go_on_on_another_one_while_the_others_keep_their_processes(
    served: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def what(of: Two) -> None:
        before = [of.rank(rank).process.pid for rank in (0, 1)]
        lose_the_second_host(of)
        with Job(life=life_of_a_newcomer(), keeps=True, patience=0.2, all_ranks_here=False) as newcomer:
            of.hosts.newcomer = newcomer
            if served:
                server = of.jobs[0].children[-1]
                with server.joined.open("a") as out:
                    out.write("waits 1 PeerLost: rank 3 died\n")
            assert of.first.look()
            told = capsys.readouterr().err
            assert "host 0: the launcher of host 1 is gone, " in told
            assert "; rank 2 and rank 3 are started again (restart 1 of 2), the others go on\n" in told
            assert of.hosts.met == [1]
            if served:
                assert of.words()[0] == Word(1, "", "")
                (of.jobs[0].scratch / "server-0").write_text("10.0.0.1:8600\n")
            assert of.look() == (True, False)  # the newcomer has nothing to mend
            assert not of.places  # it starts its ranks itself
            of.note(2, "4")
            of.look()
            assert of.words()[0] in (None, Word(1, "", ""))
            of.note(3, "4")
            of.look()
            assert of.words()[0] == Word(1, PLACE, "")
            for rank in range(4):
                of.note(rank, "goes on 1 4 5")
            if served:
                with server.joined.open("a") as out:
                    out.write("goes on 1 4 5\n")
            of.look()
            assert of.look() == (False, False)
            assert "host 0: recovered: all go on after step 4, 1 step replayed, " in capsys.readouterr().err
            assert [of.rank(rank).process.pid for rank in (0, 1)] == before
            for name in ("rank 2", "rank 3"):
                KeptParts(path_of(newcomer.kept[name])).write(4, b"")
            of.kill(3)  # the newcomer is a host as any other
            of.wait(0, 1, 2, epoch=2)
            if served:
                return
            of.look()
            assert of.places == [f"3 {PLACE}"]

    on_two(what, served=served)


def test_who_dies_in_the_place_of_a_lost_one_is_started_once_more_by_the_new_host() -> None:
    def what(of: Two) -> None:
        lose_the_second_host(of)
        with Job(life=life_of_a_newcomer(), keeps=True, patience=0.2, all_ranks_here=False) as newcomer:
            of.hosts.newcomer = newcomer
            assert of.first.look()
            of.look()
            of.note(2, "4")
            of.kill(3)
            of.look()
            assert sorted(of.places) == [f"2 {PLACE}", f"3 {PLACE}"]

    on_two(what)


def test_without_a_host_in_its_place_the_job_ends() -> None:
    def what(of: Two) -> None:
        lose_the_second_host(of)
        with pytest.raises(RecoveryFailed, match="; then the launchers of all hosts did not meet: 1 of 2 came within"):
            of.first.look()

    on_two(what)


@pytest.mark.parametrize("copies", [0, 1])
def test_without_a_copy_of_each_on_another_host_all_are_started_again(copies: int) -> None:
    def what(of: Two) -> None:
        of.note(0, *[f"{HOLDS} 2"] * copies)
        of.look()
        of.near.gone = "the launcher of host 1 is gone"
        of.wait(0, 1)
        of.now += 1.0
        with pytest.raises(ProcessFailed, match="the launcher of host 1 is gone"):
            of.first.look()
        assert not of.hosts.met

    on_two(what)
