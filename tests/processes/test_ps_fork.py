"""A trainer that forks, as a DataLoader with workers does: its children take no part, and hide nothing."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.groups import ROOT, environment

pytestmark = pytest.mark.processes

DEADLINE_S = 60.0
NOTICE_S = 1.0 + 5.0  # to notice a death, and for a process to end, on a loaded machine
TRAINER = """
import json, os, signal, sys
import ps

address, plane = sys.argv[1:3]
def say(**what):
    print(json.dumps(what), flush=True)

client = ps.connect([address], 0, 1, plane, timeout=30.0)
parameters, gradients = client.empty(100_000), client.empty(100_000)
gradients[:] = 1
client.register(parameters, ps.SGD(learning_rate=0.5))
client.push_pull(gradients)
"""
LIVES_ON = """
child = os.fork()
if not child:
    signal.pause()
say(child=child)
while True:
    client.push_pull(gradients)
"""
FORKS_OFTEN = """
codes = []
for number in range(40):
    child = os.fork()
    if not child:
        if number % 4 == 0:
            try:
                client.push_pull(gradients)
            except RuntimeError as exc:
                say(child=str(exc))
        if number == 3:
            try:
                ps.connect([address], 0, 1, plane, timeout=30.0)
            except Exception as exc:
                say(child=type(exc).__name__)
        if number % 4 == 1:
            client.close()
        if number % 4 == 2:
            sys.exit(0)
        os._exit(0)
    client.push_pull(gradients)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
client.close()
say(codes=codes, parameter=float(parameters[-1]), pid=os.getpid())
"""


@contextmanager
def started(*command: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", *command],  # Python 3.12's, of forks beside threads
        cwd=ROOT,
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children


@contextmanager
def training(program: str, plane: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """A server and its only trainer."""
    file = folder / "trainer.py"
    file.write_text(TRAINER + program)
    with started("-m", "ps.server", "--port", "0", "--nranks", "1", "--timeout", "30") as server:
        address = line_of(server).split(" listens on ")[1].split()[0]
        with started(str(file), address, plane, PYTHONPATH=str(ROOT)) as trainer:
            yield server, trainer


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    assert select.select([process.stdout], [], [], DEADLINE_S)[0], "it says nothing"
    return process.stdout.readline()


@pytest.mark.parametrize("plane", ["tcp", *(pytest.param(p, marks=pytest.mark.long) for p in ("shm", "grpc"))])
def test_a_killed_trainer_is_named_though_a_child_of_it_lives(plane: str, tmp_path: Path) -> None:
    with training(LIVES_ON, plane, tmp_path) as (server, trainer):
        child = json.loads(line_of(trainer))["child"]
        try:
            killed = time.monotonic()
            trainer.kill()
            _, complaint = server.communicate(timeout=DEADLINE_S)
            assert time.monotonic() - killed < NOTICE_S
            assert Path(f"/proc/{child}").exists()
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    assert server.returncode == 4
    assert "PeerLost: rank 0 died" in complaint


@pytest.mark.parametrize("plane", ["shm", *(pytest.param(p, marks=pytest.mark.long) for p in ("tcp", "grpc"))])
def test_children_of_a_trainer_end_well_and_leave_it_alone(plane: str, tmp_path: Path) -> None:
    with training(FORKS_OFTEN, plane, tmp_path) as (server, trainer):
        out, complaint = trainer.communicate(timeout=DEADLINE_S)
        assert (trainer.returncode, complaint) == (0, "")
        *children, ended = (json.loads(line) for line in out.splitlines())
        assert server.wait(DEADLINE_S) == 0
    refused = f"the client is that of process {ended['pid']}, from which this one was forked"
    assert ended["codes"] == [0] * 40
    assert children == [{"child": refused}, {"child": "UsageError"}] + [{"child": refused}] * 9
    assert ended["parameter"] == -0.5 * 41
