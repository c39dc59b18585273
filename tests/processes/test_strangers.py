"""Whole trainings while strangers crowd at every TCP port that they have: the same parameters as without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.support.commands import JOB, Started, digest_in, until
from tests.support.crowds import Crowd
from tests.support.ports import family_of, ports_of

pytestmark = pytest.mark.processes

STEPS = 300
JOBS = {
    "collective": ["collective.run", "--nranks", 2, "--backend", "tcp"],
    "ps": ["ps.run", "--trainers", 2, "--servers", 1, "--data-plane", "tcp"],
}


def tcp_ports_of(pid: int) -> set[int]:
    return {port.address[1] for port in ports_of(family_of(pid)) if isinstance(port.address, tuple)}


@pytest.mark.long
@pytest.mark.parametrize("scheme", JOBS)
def test_crowds_at_every_port_change_nothing(scheme: str, start: Callable[..., Started], tmp_path: Path) -> None:
    command = [*JOBS[scheme], "--steps", STEPS, *JOB, "--json"]
    start(*command, tmp_path / "alone.json").ended_well()
    job, crowded = start(*command, tmp_path / "crowded.json"), set[int]()
    with ExitStack() as crowds:

        def come() -> bool:
            """To each port 500, as soon as it is there."""
            for port in sorted(tcp_ports_of(job.process.pid) - crowded):
                crowded.add(port)
                crowds.enter_context(Crowd([port], 500))
            return job.process.poll() is not None

        until(come, "the end of the training")
    job.ended_well(telling=" turned away ")
    assert crowded, "a ring's ports are there for a moment only, and may be seen or not; servers' stay"
    assert digest_in(tmp_path / "crowded.json") == digest_in(tmp_path / "alone.json")
