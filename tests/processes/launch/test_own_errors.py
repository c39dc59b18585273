"""A program that raises in the body of its loop over `TrainingState.steps`: that rank is replaced like one that was
killed, and if the error comes back the launcher says which."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.support.commands import Started

pytestmark = [pytest.mark.processes, pytest.mark.long]
PROGRAM = """
import os, sys
import paddle
import paddle.distributed as dist
from paddle.distributed import TrainingState

who, lives, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_parallel_env()
paddle.seed(5)
model = paddle.DataParallel(paddle.nn.Linear(4, 2))
optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
state = TrainingState(model=model, optimizer=optimizer, checkpoint_dir=folder)
for _, batch in state.steps([paddle.ones([2, 4]) * each for each in range(12)]):
    if (dist.get_rank(), state.step) == (who, 7) and int(os.environ["GRADSYNC_RESTARTS"]) < lives:
        raise ValueError("a mistake of the program's own")
    model(batch).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
print("RESULT", [p.numpy().tobytes().hex() for p in model.parameters()])
"""
Run = Callable[..., Started]


@pytest.fixture
def run(tmp_path: Path, start: Callable[..., Started]) -> Run:
    def run(who: int, lives: int, command: str = "collective.run") -> Started:
        script = tmp_path / "program.py"
        script.write_text(PROGRAM)
        return start(command, "--nranks", 2, "--max-restarts", 1, script, who, lives, tmp_path / f"c{lives}")

    return run


@pytest.mark.parametrize("command", ["collective.run", pytest.param("ps.run", marks=pytest.mark.longest)])
def test_it_is_replaced_while_the_others_go_on(command: str, run: Run) -> None:
    disturbed, undisturbed = run(1, 1, command), run(1, 0)
    assert (disturbed.code, undisturbed.code) == (0, 0), disturbed.err
    assert re.search(
        r"rank 1 ended with exit code 1: ValueError: a mistake of the program's own, .*; "
        r"rank 1 is started again \(restart 1 of 1\), the others go on\n"
        r".*recovered: all go on after step 7, 0 steps replayed",
        disturbed.err,
    )
    results = [re.findall(r"^RESULT .*$", job.out, re.MULTILINE)[-1] for job in (disturbed, undisturbed)]
    assert results[0] == results[1]


def test_an_error_that_comes_back_is_named(run: Run) -> None:
    job = run(0, 2)
    assert job.code == 6
    assert (
        "collective.run: RecoveryFailed: 1 restart did not help (--max-restarts 1); last, rank 0 ended with exit code "
        "1: ValueError: a mistake of the program's own\n" in job.err
    )
