"""A stranger that meets the processes of a job, with the protocol in hand but not the job's secret."""

from __future__ import annotations

import re
import time
from pathlib import Path

import grpc
import pytest

from common import __version__
from common.errors import RendezvousError
from common.launch.child import ProcessFailed
from common.launch.ranks import abstract_address
from common.launch.servers import start_servers
from common.network import rpc
from common.network.gradsync_pb2 import JoinReply, JoinRequest
from common.network.rendezvous import METHOD
from ps.planes.methods import JOIN
from tests.support.groups import environment
from tests.support.short_job import Job

pytestmark = pytest.mark.processes

DEADLINE_S = 40.0
STRANGERS = [
    JoinRequest(version=__version__, rank=1, nranks=3, backend="shm"),
    JoinRequest(version="0.0.0", rank=1, nranks=2, backend="shm"),
    JoinRequest(version=__version__, rank=1, nranks=2, backend="other"),
    JoinRequest(version=__version__, rank=9, nranks=2, backend="shm"),
    JoinRequest(version=__version__, rank=0, nranks=2, backend="shm"),
    JoinRequest(version=__version__, rank=1, nranks=2, backend="shm"),
]
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


def refuse_all_strangers(address: str, method: str) -> None:
    with rpc.connect(address, timeout=DEADLINE_S) as channel:
        call = channel.unary_unary(method, JoinRequest.SerializeToString, JoinReply.FromString)
        for stranger in STRANGERS:
            with pytest.raises(grpc.RpcError) as caught:
                call(stranger, timeout=DEADLINE_S)
            error = rpc.translate(caught.value, address, "joining")
            assert isinstance(error, RendezvousError)
            assert "lacks the secret of the job's launcher" in str(error)


def run_with_strangers(job: Job, program: str, address: str, method: str, *, nranks: tuple[int, int] = (2, 2)) -> None:
    """Rank 0, strangers, rank 1."""
    for rank in range(2):
        command = ["-c", program, str(rank), str(nranks[rank]), address]
        job.start(f"rank {rank}", command, log=f"workerlog.{rank}", environment=environment())
        if rank == 0:
            refuse_all_strangers(address, method)
    job.wait()


def test_strangers_do_not_end_a_ring_that_is_meeting(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        run_with_strangers(job, RANK, abstract_address("test"), METHOD)
    assert [(tmp_path / f"workerlog.{rank}").read_text() for rank in range(2)] == [f"{[1.5] * 5}\n"] * 2


def test_strangers_do_not_end_a_server_that_is_waiting(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        (address,) = start_servers(job, 1, nranks=2, timeout=DEADLINE_S, environment=environment())
        run_with_strangers(job, TRAINER, address, JOIN)
    assert [(tmp_path / f"workerlog.{rank}").read_text() for rank in range(2)] == [f"{[1.5] * 5}\n"] * 2


def test_ranks_of_the_job_that_disagree_are_both_told(tmp_path: Path) -> None:
    with Job(tmp_path) as job, pytest.raises(ProcessFailed):
        run_with_strangers(job, RANK, abstract_address("test"), METHOD, nranks=(2, 3))
    for rank in range(2):
        text = (tmp_path / f"workerlog.{rank}").read_text()
        assert "RendezvousError: rank 1 was started with nranks 3, the group with 2" in text


def test_the_secret_stands_in_no_command_line() -> None:
    with Job() as job:
        process = job.start("rank 0", ["-c", "input()"], log="log", talk=True)
        assert re.fullmatch("[0-9a-f]{32}", job.secret)
        assert job.secret not in repr(job)
        deadline = time.monotonic() + DEADLINE_S
        while job.secret not in Path(f"/proc/{process.pid}/environ").read_text():  # it has not begun
            assert time.monotonic() < deadline
        assert job.secret not in Path(f"/proc/{process.pid}/cmdline").read_text()
        process.communicate(b"\n")


def test_ranks_of_several_hosts_have_no_secret() -> None:
    """Their launchers have none in common."""
    with Job(all_ranks_here=False) as job:
        code = "import os; print(os.environ['GRADSYNC_JOB_SECRET'])"
        process = job.start("rank 0", ["-c", code], log="log", talk=True, environment={"GRADSYNC_JOB_SECRET": "outer"})
        assert process.communicate()[0] == b"\n"
