"""Launchers that an engine has started as one of several tasks each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.groups import ROOT, environment

pytestmark = pytest.mark.processes

LIMIT_S = 60
OVER_A_RING = """
import os, sys
import collective
rank, nranks = (int(os.environ[name]) for name in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"))
with collective.connect(rank, nranks, os.environ["GRADSYNC_RENDEZVOUS"]) as group:
    array = group.empty(3)
    array[...] = rank + 1
    group.all_reduce(array)
    print(rank, nranks, array.tolist(), sys.argv[1:])
sys.exit(7 * rank)
"""
OVER_SERVERS = """
import os
import numpy as np
import ps
rank, nranks = (int(os.environ[name]) for name in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"))
with ps.connect(os.environ["GRADSYNC_SERVERS"], rank, nranks) as client:
    client.register(np.zeros(3, np.float32))
    gradients = np.full(3, rank + 1, np.float32)
    client.push_pull(gradients)
    print(rank, nranks, gradients.tolist(), os.environ["GRADSYNC_ENGINE"])
"""


def run_tasks(count: int, job: str, *command: object, **variables: str) -> Sequence[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each of so many tasks of an engine that starts them on this host."""
    started = []
    for index in range(count):
        told = {
            "OMPI_COMM_WORLD_RANK": str(index),
            "OMPI_COMM_WORLD_SIZE": str(count),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
            "PMIX_NAMESPACE": job,
            **variables,
        }
        started.append(
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                env={**environment(), **told},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    told_by = [task.communicate(timeout=LIMIT_S) for task in started]
    return [(task.returncode, *told) for task, told in zip(started, told_by, strict=True)]


def test_each_task_is_a_rank_and_ends_with_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OVER_A_RING)
    ended = run_tasks(2, str(tmp_path), "-m", "collective.run", script, "--mine")
    assert [code for code, _, _ in ended] == [0, 7], ended
    assert [out for _, out, _ in ended] == [f"{rank} 2 [1.5, 1.5, 1.5] ['--mine']\n" for rank in range(2)]
    assert f"Open MPI has started 2 tasks of {script}: each is one rank" in ended[0][2]


def test_the_first_tasks_serve_and_the_others_train(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OVER_SERVERS)
    ended = run_tasks(3, str(tmp_path), "-m", "ps.run", script, GRADSYNC_SERVERS="1")
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert [out for _, out, _ in ended[1:]] == [f"{rank} 2 [1.5, 1.5, 1.5] Open MPI\n" for rank in range(2)]
    assert f"Open MPI has started 3 tasks of {script}: 1 serve, 2 are ranks" in ended[1][2]


def test_tasks_that_contradict_the_flags_say_so_in_a_line_each(tmp_path: Path) -> None:
    ended = run_tasks(1, str(tmp_path), "-m", "collective.run", "--nranks", 3, OMPI_COMM_WORLD_SIZE="2")
    assert ended[0][0] == 2
    assert ended[0][2].startswith(
        "collective.run: UsageError: --nranks 3 contradicts Open MPI, which has started 2 tasks"
    )
    assert ended[0][2].count("\n") == 1
