"""A server that a program of the user's own runs by `fleet.run_server()`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import ps
from common.errors import PeerLost
from tests.support import warm
from tests.support.groups import environment, free_port

pytestmark = pytest.mark.processes

DEADLINE_S = 60.0
PROGRAM = """
import signal, sys
import ps as fleet

role = fleet.UserDefinedRoleMaker(current_id=0, role="server", worker_num=1, server_endpoints=[sys.argv[1]])
fleet.init(role)
fleet.init_server()
before = signal.getsignal(signal.SIGTERM)
fleet.run_server()
print("handler", signal.getsignal(signal.SIGTERM) is before)
"""


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    (folder / "program.py").write_text(PROGRAM)
    address = f"127.0.0.1:{free_port()}"
    with warm.Popen(
        [sys.executable, str(folder / "program.py"), address],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, address
        finally:
            process.kill()


def trainer(address: str) -> ps.Connection:
    connection = ps.connect([address], 0, 1, timeout=DEADLINE_S)
    connection.register(np.zeros(8, np.float32), ps.SGD(learning_rate=0.5))
    connection.push_pull(np.ones(8, np.float32))
    return connection


def goes_on(connection: ps.Connection) -> None:
    while True:
        connection.push_pull(np.ones(8, np.float32))


def test_it_returns_when_all_have_left_and_leaves_signals_as_they_were(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, address):
        trainer(address).close()
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "handler True"


def test_on_sigterm_the_trainers_hear_why(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, address):
        connection = trainer(address)
        process.send_signal(signal.SIGTERM)
        text = rf"server 0 at {address} was told to stop \(SIGTERM\)"
        with pytest.raises(PeerLost, match=text), connection:
            goes_on(connection)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "was told to stop (SIGTERM)" in err.splitlines()[-1]
