"""Parameter servers that die before all of them listen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from common.errors import RecoveryFailed
from common.launch.job import Job
from common.launch.restarts import Life, RestartFlags, supervise
from common.launch.servers import Servers
from tests.support.groups import DEADLINE_S

pytestmark = pytest.mark.processes


@dataclass
class Shot(Servers):
    """Of which some are killed as soon as they are started."""

    shots: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)

    def start(self, index: int) -> None:
        super().start(index)
        self.started.append(index)
        if index in self.shots:
            self.shots.remove(index)
            self.job.children[-1].process.kill()


def run(restarts: int, then: Callable[[Job, Shot], None], shots: list[int]) -> None:
    def live(life: Life) -> None:
        with Job(life=life, keeps=True, begins=True) as job:
            then(job, Shot(job, 2, nranks=1, timeout=DEADLINE_S, shots=shots))

    supervise(RestartFlags(max_restarts=restarts), live, prog="ps.run")


@pytest.mark.parametrize("shot", [0, 1])
def test_one_that_is_killed_before_it_listens_is_started_again_alone(
    shot: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def then(job: Job, servers: Shot) -> None:
        addresses = servers.start_all()
        assert len(set(addresses)) == 2
        assert addresses == servers.addresses()
        assert sorted(servers.started) == sorted([0, 1, shot])  # the other one was not
        said = capsys.readouterr().err
        assert f"server {shot} was killed by SIGKILL" in said
        assert f"server {shot} is started again (restart 1 of 2), the others wait\n" in said
        assert job.life.number == 0
        assert sorted(child.name for child in job.children) == ["server 0", "server 1"]
        assert all(child.code is None for child in job.children)

    run(2, then, [shot])


def test_one_that_listens_already_is_waited_for_again(wait_until: Callable[..., None]) -> None:
    def then(job: Job, servers: Shot) -> None:
        first = servers._files()[0]

        def start(index: int) -> None:
            Servers.start(servers, index)
            if len(job.children) == 2 and not told:
                wait_until(lambda: first.exists() and first.read_text().endswith("\n"))
                told.append(first.read_text().strip())
                job.children[0].process.kill()
                job.children[0].process.wait()

        told: list[str] = []
        servers.start = start
        addresses = servers.start_all()
        assert addresses[0] != told[0]
        assert addresses == servers.addresses()

    run(1, then, [])


def test_no_more_often_than_may_be() -> None:
    with pytest.raises(RecoveryFailed, match="1 restart did not help") as caught:
        run(1, lambda _, servers: servers.start_all(), [0, 0, 0, 0])
    assert "server 0 was killed by SIGKILL" in str(caught.value)
