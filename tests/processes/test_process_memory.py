"""How much memory a process needs, and that a parameter server needs its data and little more."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.launch.job import Job
from common.launch.servers import start_servers
from common.system.memory import SEALS, Segment, segment_name
from common.system.process import JOB_SECRET_VARIABLE
from common.system.process_memory import ProcessMemory, added_since, leave_memory, memory_of, pss_bytes
from common.tensors.optimizers import Adam
from ps.connection import connect
from tests.support.groups import DEADLINE_S, ROOT, environment, on_threads

SIZE = 16 << 20
ROUND = 2 << 20  # what else may come and go in a process


def run_alone(body: Callable[[Path], None], folder: Path) -> None:
    """In a process of its own: in that of the tests, what others have left is given back at any time."""
    command = (
        f"import pathlib, sys, tests.processes.{Path(__file__).stem} as t; t.{body.__name__}(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, str(folder)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_is_private_counts_and_so_does_what_was_made_here(tmp_path: Path) -> None:
    run_alone(uses_memory, tmp_path)


def uses_memory(folder: Path) -> None:
    leave_memory(folder / "before")
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private, Segment(SIZE) as mine:
        for _ in range(SIZE // 4096):
            private.write(b"x" * 4096)
        mine.bytes.fill(1)
        with Segment(SIZE, descriptor=os.dup(mine.descriptor)) as again:  # as by a second process
            again.bytes.fill(2)
            added = added_since(folder / "before")
        assert added.own == pytest.approx(3 * SIZE, abs=ROUND)
        assert added.pss == pytest.approx(2 * SIZE, abs=ROUND)


def test_what_another_process_has_made_is_not_ours(tmp_path: Path) -> None:
    run_alone(maps_what_another_made, tmp_path)


def maps_what_another_made(_: Path) -> None:
    before, quick = memory_of(os.getpid()), pss_bytes()
    other = segment_name(int(f"{os.getpid()}0"))
    with os.fdopen(os.memfd_create(other, os.MFD_ALLOW_SEALING), "wb") as file:
        file.truncate(SIZE)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        with Segment(SIZE, descriptor=os.dup(file.fileno())) as theirs:
            theirs.bytes.fill(1)
            now = memory_of(os.getpid())
            assert now.own - before.own == pytest.approx(0, abs=ROUND)
            assert now.pss - before.pss == pytest.approx(SIZE, abs=ROUND)
            assert pss_bytes() - quick == pytest.approx(SIZE, abs=ROUND)


def test_a_process_that_has_ended_uses_none() -> None:
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
        with pytest.raises(ProcessLookupError):
            memory_of(ended.pid)


PARAMETERS = 60_000_000  # bytes
MARGIN = 54_000_000  # less than an array, so that none can be superfluous; the ruling allows 100 MB


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plane", "least", "most"),
    [pytest.param("grpc", 1 + 2, 1 + 2 + 2, marks=pytest.mark.long), ("tcp", 1 + 2, 1 + 2 + 2), ("shm", 2, 2)],
)
def test_a_server_needs_its_data_and_little_more(
    plane: str, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, Adam's two moments, and of the trainers' gradients what one is ahead of the other; or the moments
    alone, where the rest lies in the trainers' memory."""
    pytest.importorskip("paddle")
    with Job() as job:
        monkeypatch.setenv(JOB_SECRET_VARIABLE, job.secret)
        (address,) = start_servers(job, 1, nranks=2, timeout=60.0)
        server = job.children[0].process.pid
        before = memory_of(server)

        def train(rank: int) -> ProcessMemory:
            with connect([address], rank, 2, plane, timeout=60.0) as connection:
                parameters, gradients = connection.empty(PARAMETERS // 4), connection.empty(PARAMETERS // 4)
                gradients.fill(1 + rank)
                connection.register(parameters, Adam(learning_rate=0.1))
                for _ in range(2):
                    connection.push_pull(gradients)
                connection.barrier()
                now = memory_of(server)
                connection.barrier()
                return now

        after = on_threads(2, train)[0]
    assert (least - 0.1) * PARAMETERS < after.own - before.own < most * PARAMETERS + MARGIN
