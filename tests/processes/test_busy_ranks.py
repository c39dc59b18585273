"""Busy is not frozen: a rank that computes for longer than --timeout is waited for, and named, under both schemes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from common.errors import PeerStalled
from common.network.patience import WAIT_LIMIT_S
from ps.coordinator.servicer import ParameterServer
from tests.support.commands import until
from tests.support.groups import ROOT, RankProcesses, environment, limit_waits

pytestmark = pytest.mark.processes

LIMIT_S = 2.0  # the timeout
BUSY_S = 5.0
DEADLINE_S = 60.0
LINES = [r"for 2 s; it is alive", r"for 4 s; it is alive"]  # one for each doubling
planes = pytest.mark.parametrize(
    "plane",
    ["tcp", pytest.param("shm", marks=pytest.mark.long), pytest.param("grpc", marks=pytest.mark.longest)],
)


def computes(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


# All-reduce


def is_busy_on_rank_0(group, limit=WAIT_LIMIT_S, seconds=BUSY_S):
    limit_waits([group], LIMIT_S, wait_limit=limit)
    array = group.empty(1000)
    for step in range(3):
        if group.rank == 0 and step == 1:
            computes(seconds)
        array.fill(group.rank + step)
        group.all_reduce(array, "sum", step=step)
        assert array[0] == array[-1] == sum(rank + step for rank in range(group.nranks))


def is_busy_for_ever_on_rank_0(group):
    is_busy_on_rank_0(group, 1.5 * LIMIT_S, 30.0)


@pytest.mark.parametrize("backend", ["shm", *(pytest.param(b, marks=pytest.mark.longest) for b in ("tcp", "tcp-ring"))])
def test_a_rank_that_computes_for_longer_than_the_timeout_is_waited_for(backend, capfd):
    """A third one, which in a ring waits for one that waits, tells the same."""
    with RankProcesses(is_busy_on_rank_0, 3, backend) as ranks:
        for rank in range(3):
            assert ranks.hear(rank, "ended")["ended"] == "well"
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"rank 1, 2 wait for rank 0, at step 1, {text}" for text in LINES]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_rank_that_is_alive_but_slower_than_the_wait_limit_is_named(backend, capfd):
    with RankProcesses(is_busy_for_ever_on_rank_0, 2, backend) as ranks:
        end = ranks.hear(1, "ended")
        assert ranks.code(1) == 4
    assert end["ended"] == "PeerStalled"
    assert re.fullmatch(
        r"rank 0 did not take part for 3 s \(rank 1 was waiting for (it|data)\); it is alive, but slower than "
        "--wait-limit allows: raise that if it only computes",
        end["text"],
    )
    assert "rank 1 waits for rank 0, at step 1, for 2 s; it is alive" in capfd.readouterr().err


# Servers

TRAINER = """
import sys
import ps
from tests.processes.test_busy_ranks import computes

address, plane, rank, busy = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
with ps.connect([address], rank, 2, plane) as trainer:
    parameters, gradients = trainer.empty(1000), trainer.empty(1000)
    gradients.fill(rank)
    trainer.register(parameters, ps.SGD(learning_rate=0.5))
    for step in range(3):
        if rank == 0 and step == 1:
            computes(busy)
        trainer.push_pull(gradients)
    print(parameters[-1])
"""


@contextmanager
def training(
    plane: str, folder: Path, busy: float, wait_limit: float
) -> Iterator[tuple[ParameterServer, list[subprocess.Popen[str]]]]:
    """Two trainers of a server in this process, past their first step: they no longer depend on how fast they start."""
    file = folder / "trainer.py"
    file.write_text(TRAINER)
    with ExitStack() as stack:
        server = stack.enter_context(ParameterServer("127.0.0.1:0", 2, wait_limit=wait_limit))
        trainers = []
        for rank in range(2):
            process = subprocess.Popen(
                [sys.executable, str(file), server.address, plane, str(rank), str(busy)],
                env={**environment(), "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            trainers.append(process)
        until(lambda: server.steps >= 1, "the first step")
        server._coordinator.silence.patience.timeout = LIMIT_S
        yield server, trainers


@planes
def test_a_trainer_that_computes_for_longer_than_the_timeout_is_waited_for(plane, tmp_path):
    pytest.importorskip("paddle")
    with training(plane, tmp_path, BUSY_S, WAIT_LIMIT_S) as (server, trainers):
        told = [trainer.communicate(timeout=DEADLINE_S) for trainer in trainers]
        server.wait()
    assert [trainer.returncode for trainer in trainers] == [0, 0], told
    assert [out for out, _ in told] == [f"{np.float32(-0.75)}\n"] * 2
    assert told[0][1].splitlines() == [f"rank 1 waits for rank 0, at step 1, {text}" for text in LINES]
    assert told[1][1] == ""


def test_a_trainer_that_is_stopped_is_named_at_the_timeout(tmp_path):
    pytest.importorskip("paddle")
    with training("shm", tmp_path, 60.0, WAIT_LIMIT_S) as (server, trainers):
        stopped = time.monotonic()
        trainers[0].send_signal(signal.SIGSTOP)
        with pytest.raises(PeerStalled) as caught:
            server.wait()
        assert LIMIT_S - 0.5 < time.monotonic() - stopped < LIMIT_S + 5.0
        _, complaint = trainers[1].communicate(timeout=DEADLINE_S)
    expected = (
        "rank 0 did not take part in step 1 for 2 s; it gives no sign of life (--timeout): it is stopped or in a "
        "debugger, or its host is gone"
    )
    assert str(caught.value) == expected
    assert expected in complaint


@pytest.mark.long
def test_a_trainer_that_is_alive_but_slower_than_the_wait_limit_is_named(tmp_path):
    pytest.importorskip("paddle")
    with training("shm", tmp_path, 60.0, 1.5 * LIMIT_S) as (server, trainers):
        with pytest.raises(PeerStalled) as caught:
            server.wait()
        _, complaint = trainers[1].communicate(timeout=DEADLINE_S)
    expected = (
        "rank 0 did not take part in step 1 for 3 s; it is alive, but slower than --wait-limit allows: raise that if "
        "it only computes"
    )
    assert str(caught.value) == expected
    assert expected in complaint
