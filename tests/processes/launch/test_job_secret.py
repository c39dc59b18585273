"""Strangers of the same user who meet the processes of a job, with the protocol in hand but not the job's secret."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from common.credentials.credentials import find
from common.credentials.token import new_token
from common.errors import CredentialsRefused
from common.launch.child import ProcessFailed
from common.launch.ranks import abstract_address
from common.launch.restarts import Life, RestartFlags, supervise
from common.launch.servers import start_servers
from common.network import rpc
from ps.status import ask, credentials_for
from tests.support.channels import INSECURE, OTHERS
from tests.support.groups import environment
from tests.support.short_job import Job

pytestmark = pytest.mark.processes

DEADLINE_S = 40.0
RANK = """
import sys
import collective
rank, nranks, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with collective.connect(rank, nranks, address, backend="shm") as group:
    array = group.empty(5)
    array[...] = rank + 1
    group.all_reduce(array)
    print(array.tolist())
"""
TRAINER = """
import sys, numpy as np
import ps
rank, nranks, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with ps.connect([address], rank, nranks) as client:
    client.register(np.zeros(5, np.float32))
    gradients = np.full(5, rank + 1, np.float32)
    client.push_pull(gradients)
    print(gradients.tolist())
"""


def refuse_all_strangers(address: str) -> None:
    for credentials in (find(environment={}), OTHERS, INSECURE):
        refused = pytest.raises(CredentialsRefused)
        with refused, rpc.connect(address, timeout=DEADLINE_S, credentials=credentials):
            pass


def run_with_strangers(job: Job, program: str, address: str, *, nranks: tuple[int, int] = (2, 2)) -> None:
    """Rank 0, strangers, rank 1."""
    for rank in range(2):
        command = ["-c", program, str(rank), str(nranks[rank]), address]
        job.start(f"rank {rank}", command, log=f"workerlog.{rank}", environment=environment())
        if rank == 0:
            refuse_all_strangers(address)
    job.wait()


def test_strangers_do_not_end_a_ring_that_is_meeting(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        run_with_strangers(job, RANK, abstract_address("test"))
    assert [(tmp_path / f"workerlog.{rank}").read_text() for rank in range(2)] == [f"{[1.5] * 5}\n"] * 2


def test_strangers_do_not_end_a_server_that_is_waiting(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        (address,) = start_servers(job, 1, nranks=2, timeout=DEADLINE_S, environment=environment())
        run_with_strangers(job, TRAINER, address)
    assert [(tmp_path / f"workerlog.{rank}").read_text() for rank in range(2)] == [f"{[1.5] * 5}\n"] * 2


def test_the_status_of_a_launchers_servers_is_told_to_its_user(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        (address,) = start_servers(job, 1, nranks=2, timeout=DEADLINE_S, environment=environment())
        found = credentials_for(address)
        assert (found.kind, found.secret.hex()) == ("job", job.secret)
        with rpc.connect(address, timeout=DEADLINE_S, credentials=found) as channel:
            (reply,) = ask([address], [channel], DEADLINE_S)
        assert reply.state == "waiting for trainers"


def test_ranks_of_the_job_that_disagree_are_both_told(tmp_path: Path) -> None:
    with Job(tmp_path) as job, pytest.raises(ProcessFailed):
        run_with_strangers(job, RANK, abstract_address("test"), nranks=(2, 3))
    for rank in range(2):
        text = (tmp_path / f"workerlog.{rank}").read_text()
        assert "RendezvousError: rank 1 was started with nranks 3, the group with 2" in text


def test_the_secret_stands_in_no_command_line() -> None:
    with Job() as job:
        process = job.start("rank 0", ["-c", "input()"], log="log", talk=True)
        assert re.fullmatch("[0-9a-f]{64}", job.secret)
        assert job.secret not in repr(job)
        deadline = time.monotonic() + DEADLINE_S
        while job.secret not in Path(f"/proc/{process.pid}/environ").read_text():  # it has not begun
            assert time.monotonic() < deadline
        assert job.secret not in Path(f"/proc/{process.pid}/cmdline").read_text()
        process.communicate(b"\n")


def test_each_life_of_a_job_has_a_secret_of_its_own() -> None:
    told: list[bytes] = []

    def live(life: Life) -> None:
        with Job(life=life) as job:
            code = "import os, signal; print(os.environ['GRADSYNC_JOB_SECRET'], flush=True); signal.raise_signal(9)"
            process = job.start("rank 0", ["-c", code], log="log", talk=True)
            assert process.stdout
            told.append(process.stdout.readline().strip())
            if life.number < 2:
                job.wait()

    supervise(RestartFlags(max_restarts=2), live, prog="ps.run")
    assert all(re.fullmatch(b"[0-9a-f]{64}", each) for each in told)
    assert len({*told}) == len(told) == 3


def test_a_token_reaches_ranks_of_several_hosts_by_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    token = new_token()
    monkeypatch.setenv("GRADSYNC_TOKEN", token)
    with Job(all_ranks_here=False) as job:
        code = "import os; print(os.environ['GRADSYNC_TOKEN']); input()"
        process = job.start("rank 0", ["-c", code], log="log", talk=True)
        assert process.stdout
        assert process.stdout.readline().decode().strip() == token
        assert token not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert token not in repr(job)
        process.communicate(b"\n")


def test_ranks_of_several_hosts_have_no_secret() -> None:
    """Their launchers have none in common."""
    with Job(all_ranks_here=False) as job:
        code = "import os; print(os.environ['GRADSYNC_JOB_SECRET'])"
        process = job.start("rank 0", ["-c", code], log="log", talk=True, environment={"GRADSYNC_JOB_SECRET": "outer"})
        assert process.communicate()[0] == b"\n"
