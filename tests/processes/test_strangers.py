"""Whole trainings while strangers crowd at every TCP port that they have: the same parameters as without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.support.commands import JOB, Started, digest_in, until
from tests.support.crowds import Crowd
from tests.support.groups import free_port
from tests.support.ports import family_of, ports_of

pytestmark = pytest.mark.processes

STEPS = 300
SERVED = ["--trainers", 2, "--servers", 1, "--data-plane", "tcp"]
RING = ["--nranks", 2, "--backend", "tcp"]


class Crowds:
    """A context manager: to each TCP port of these jobs come 500 strangers, as soon as `come` sees it."""

    def __init__(self) -> None:
        self.ports: set[int] = set()
        self._stack = ExitStack()

    def come(self, *jobs: Started) -> bool:
        """Whether any have come, now or before."""
        for port in sorted({p for job in jobs for p in tcp_ports_of(job.process.pid)} - self.ports):
            self.ports.add(port)
            self._stack.enter_context(Crowd([port], 500))
        return bool(self.ports)

    def until_the_end_of(self, *jobs: Started) -> None:
        until(lambda: (self.come(*jobs), all(job.process.poll() is not None for job in jobs))[1], "the end")
        for job in jobs:
            job.ended_well(telling=" turned away ")

    def __enter__(self) -> Crowds:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def tcp_ports_of(pid: int) -> set[int]:
    return {port.address[1] for port in ports_of(family_of(pid)) if isinstance(port.address, tuple)}


@pytest.mark.long
def test_crowds_at_every_port_of_servers_change_nothing(start: Callable[..., Started], tmp_path: Path) -> None:
    command = ["ps.run", *SERVED, "--steps", STEPS, *JOB, "--json"]
    start(*command, tmp_path / "alone.json").ended_well()
    with Crowds() as crowds:
        crowds.until_the_end_of(start(*command, tmp_path / "crowded.json"))
        assert crowds.ports
    assert digest_in(tmp_path / "crowded.json") == digest_in(tmp_path / "alone.json")


@pytest.mark.long
def test_crowds_at_every_port_of_a_ring_change_nothing(start: Callable[..., Started], tmp_path: Path) -> None:
    """Its ports are there until all have met, so rank 1 comes when rank 0 has got its crowd."""
    flags = [*RING, "--steps", STEPS, *JOB, "--json"]
    start("collective.run", *flags, tmp_path / "alone.json").ended_well()
    trainer = ["collective.trainer", "--rendezvous", f"127.0.0.1:{free_port()}", *flags, tmp_path / "crowded.json"]
    with Crowds() as crowds:
        ranks = [start(*trainer, "--rank", 0)]
        until(lambda: crowds.come(*ranks), "the ports of rank 0")
        ranks.append(start(*trainer, "--rank", 1))
        crowds.until_the_end_of(*ranks)
    assert digest_in(tmp_path / "crowded.json") == digest_in(tmp_path / "alone.json")
