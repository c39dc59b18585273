"""Row 17: a port that somebody has is named within a second, and never shared."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.faults.jobs import Start

LIMIT_S = 1.0
PLACES = ("server", "data port", "metrics", "rendezvous")


@pytest.fixture(params=["of another program", "of ours"])
def taken(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port where somebody listens who would share it, or who would not."""
    with socket.socket() as squatter:
        if request.param == "of another program":
            squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        yield squatter.getsockname()[1]


@pytest.mark.parametrize("where", PLACES)
def test_a_port_in_use(where: str, taken: int, start: Start) -> None:
    job = start("tests.faults.taken_port", where, f"127.0.0.1:{taken}")
    assert job.code == 0, job.err
    seconds, name, text = job.out.split(" ", 2)
    assert (name, float(seconds) < LIMIT_S) == ("PortInUse", True), job.out
    assert f"127.0.0.1:{taken}" in text
