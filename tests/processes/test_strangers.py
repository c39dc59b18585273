"""Whole trainings while strangers crowd at every TCP port that they have: the same parameters as without."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.support.commands import JOB, Started, end_all, until
from tests.support.crowds import Crowd

pytestmark = pytest.mark.processes

STEPS = 300
LISTENS = "0A"  # of /proc/net/tcp
JOBS = {
    "collective": ["collective.run", "--nranks", 2, "--backend", "tcp"],
    "ps": ["ps.run", "--trainers", 2, "--servers", 1, "--data-plane", "tcp"],
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start(*command: object) -> Started:
        folder = tmp_path / f"process-{len(started)}"
        folder.mkdir()
        started.append(Started(folder, *command))
        return started[-1]

    yield start
    end_all(started)


def family_of(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [each for child in (thread / "children").read_text().split() for each in family_of(int(child))]
    return found


def sockets_of(pids: Sequence[int]) -> set[str]:
    """Their numbers in the kernel's table."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return {link.removeprefix("socket:[").rstrip("]") for link in found if link.startswith("socket:[")}


def ports_of(pid: int) -> set[int]:
    """Where a job awaits TCP connections, as the kernel's table says."""
    own = sockets_of(family_of(pid))
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]  # gRPC's IPv4 is in the latter
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {int(line[1].partition(":")[2], 16) for line in lines if line[3] == LISTENS and line[9] in own}


def digest(file: Path) -> str:
    return str(json.loads(file.read_text())["parameters_sha256"])


@pytest.mark.long
@pytest.mark.parametrize("scheme", JOBS)
def test_crowds_at_every_port_change_nothing(scheme: str, start: Callable[..., Started], tmp_path: Path) -> None:
    command = [*JOBS[scheme], "--steps", STEPS, *JOB, "--json"]
    start(*command, tmp_path / "alone.json").ended_well()
    job, crowded = start(*command, tmp_path / "crowded.json"), set[int]()
    with ExitStack() as crowds:

        def come() -> bool:
            """To each port 500, as soon as it is there."""
            for port in sorted(ports_of(job.process.pid) - crowded):
                crowded.add(port)
                crowds.enter_context(Crowd([port], 500))
            return job.process.poll() is not None

        until(come, "the end of the training")
    job.ended_well()
    assert len(crowded) >= 2, "the ports of the meeting and of the data"
    assert digest(tmp_path / "crowded.json") == digest(tmp_path / "alone.json")
