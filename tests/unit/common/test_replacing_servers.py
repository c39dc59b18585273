"""When a launcher replaces trainers and servers: by processes that only sleep, and notes and addresses by hand."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from common.commit.kept_parts import KeptParts, path_of
from common.launch.child import Child, ProcessFailed
from common.launch.job import Job
from common.launch.replacing import Replacing
from common.launch.restarts import Life, RestartFlags, supervise
from common.launch.servers import Servers
from common.system.next_epoch import Word, word_in
from tests.support.commands import until
from tests.support.jobs import PAUSE, start

TRAINERS, SERVERS = 2, 2


class Served(Servers):
    """Servers that only sleep."""

    def start(self, index: int) -> None:
        self.job.start(f"server {index}", ["-c", PAUSE], log=f"serverlog.{index}")


class Mended:
    """A job of two trainers and two servers, all of which have kept a boundary."""

    def __init__(self, job: Job) -> None:
        self.job, self.places = job, [""] * 0
        self.servers = Served(job, SERVERS, nranks=TRAINERS, timeout=30.0)
        self.now = 0.0
        self.replacing = Replacing(job, self.start, 30.0, self.servers, clock=lambda: self.now)
        for index in range(SERVERS):
            self.servers.start(index)
            self.listens(index, "first")
        for rank in range(TRAINERS):
            start(job, rank, PAUSE)
            self.note(f"rank {rank}", "2", "complete")
        for child in job.children:
            KeptParts(path_of(job.kept[child.name])).write(0, b"")

    def start(self, rank: int, place: str) -> None:
        self.places.append(place)
        start(self.job, rank, PAUSE)

    def listens(self, index: int, where: str) -> None:
        (self.job.scratch / f"server-{index}").write_text(f"{where}-{index}\n")

    def child(self, name: str) -> Child:
        return next(child for child in self.job.children if child.name == name)

    def note(self, name: str, *lines: str) -> None:
        with self.child(name).joined.open("a") as out:
            out.writelines(f"{line}\n" for line in lines)

    def loses(self, name: str, epoch: int = 1) -> None:
        """It is killed, and all others wait."""
        self.child(name).process.kill()
        self.child(name).process.wait()
        for other in self.job.children:
            if other.name != name:
                self.note(other.name, f"waits {epoch} PeerLost: {name} died")

    def pids(self) -> dict[str, int]:
        return {child.name: child.process.pid for child in self.job.children}

    def word(self) -> Word | None:
        return word_in(self.job.word_file)

    def look(self) -> bool:
        self.replacing._looked_at = -1.0  # the time to look is now
        return self.replacing.look()


@pytest.fixture
def mended() -> Callable[..., None]:
    """Runs something with such a job, of two restarts."""

    def run(what: Callable[[Mended], None]) -> None:
        def live(life: Life) -> None:
            with Job(life=life, keeps=True, patience=0.2) as job:
                what(Mended(job))

        supervise(RestartFlags(max_restarts=2), live, prog="ps.run")

    return run


Run = Callable[..., None]


def test_servers_listen_anew_before_a_trainer_is_started_again(mended: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def what(of: Mended) -> None:
        before = of.pids()
        of.loses("rank 1")
        assert of.look()
        assert of.look()
        assert "; rank 1 is started again (restart 1 of 2), the others go on" in capsys.readouterr().err
        assert of.word() == Word(1, "", of.job.secret)  # for the servers, where the trainers are to meet
        assert not of.places
        of.listens(0, "then")
        assert of.look()
        assert not of.places  # the other one does not listen yet
        of.listens(1, "then")
        assert of.look()
        assert of.places == ["then-0,then-1"]
        assert of.look()
        assert of.word() == Word(1, "", of.job.secret)  # the new one may prepare for long
        of.note("rank 1", "2")
        assert of.look()
        assert of.word() == Word(1, "then-0,then-1", of.job.secret)
        for name in before:
            assert "recovered" not in capsys.readouterr().err
            of.note(name, "goes on 1 4 4")
            assert of.look()
        assert "recovered: all go on after step 4, 0 steps replayed" in capsys.readouterr().err
        assert not of.look()
        assert {name for name, pid in of.pids().items() if pid != before[name]} == {"rank 1"}

    mended(what)


def test_a_server_is_started_again_and_the_trainers_meet_where_it_listens(mended: Run) -> None:
    def what(of: Mended) -> None:
        before = of.pids()
        of.loses("server 0")
        assert of.look()
        assert {name for name, pid in of.pids().items() if pid != before[name]} == {"server 0"}
        of.listens(1, "then")
        assert of.look()
        assert of.word() == Word(1, "", of.job.secret)
        of.listens(0, "then")
        assert of.look()
        assert of.look()
        assert of.word() == Word(1, "then-0,then-1", of.job.secret)
        assert not of.places

    mended(what)


def test_a_trainer_that_dies_before_it_joins_is_started_once_more_at_servers_of_a_further_epoch(mended: Run) -> None:
    def what(of: Mended) -> None:
        of.loses("rank 0")
        assert of.look()
        for index in range(SERVERS):
            of.listens(index, "then")
        assert of.look()
        assert of.places == ["then-0,then-1"]
        of.child("rank 0").process.kill()
        of.child("rank 0").process.wait()
        assert of.look()
        assert of.word() == Word(2, "", of.job.secret)
        assert of.look()
        assert len(of.places) == 1
        for index in range(SERVERS):
            of.listens(index, "at last")
        assert of.look()
        assert of.places[1:] == ["at last-0,at last-1"]

    mended(what)


@pytest.mark.parametrize("who", ["server 1", "rank 1"])
def test_all_are_started_again_where_somebody_has_kept_nothing(who: str, mended: Run) -> None:
    def what(of: Mended) -> None:
        KeptParts(path_of(of.job.kept[who])).clear()
        of.loses("rank 0")
        assert not of.look()
        assert not of.look()
        assert of.word() is None

    mended(what)


def test_the_death_of_a_server_that_goes_on_starts_all_again(mended: Run) -> None:
    def what(of: Mended) -> None:
        of.loses("rank 0")
        assert of.look()
        of.child("server 1").process.kill()
        of.child("server 1").process.wait()
        assert not of.look()

    mended(what)


def test_all_are_started_again_where_only_servers_live(mended: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """They have the optimizer's state, and no parameters."""

    def what(of: Mended) -> None:
        of.loses("rank 0")
        of.child("rank 1").process.kill()
        of.child("rank 1").process.wait()
        assert not of.look()
        assert "started again" not in capsys.readouterr().err
        assert not of.places

    mended(what)


def test_where_a_server_that_lives_freezes_before_it_listens_again_all_are_started_again(mended: Run) -> None:
    def what(of: Mended) -> None:
        of.loses("rank 1")
        assert of.look()
        of.listens(0, "then")
        frozen = of.child("server 1").process
        os.kill(frozen.pid, signal.SIGSTOP)
        until(of.child("server 1").is_frozen, "it to freeze")
        assert of.look()
        of.now += 29
        assert of.look()
        of.now += 2
        with pytest.raises(ProcessFailed, match=r"^server 1 was frozen for 30 s before it listened$"):
            of.look()
        assert frozen.returncode == -signal.SIGKILL

    mended(what)
