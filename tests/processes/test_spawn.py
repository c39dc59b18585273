"""`spawn` starts ranks as paddle.distributed.spawn does, and tells who failed."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")
import collective
import ps
from common.launch.child import ProcessFailed

pytestmark = pytest.mark.processes


def average_ranks(scheme: str, folder: str) -> None:
    import importlib

    import paddle

    dist = importlib.import_module(scheme)
    dist.init_parallel_env()
    tensor = paddle.to_tensor([float(dist.get_rank()), 10.0])
    dist.all_reduce(tensor)
    gathered: list[object] = []
    dist.all_gather(gathered, paddle.to_tensor([dist.get_rank()]))
    dist.broadcast(tensor, src=1)
    dist.barrier()
    text = f"{dist.get_world_size()} {tensor.numpy().tolist()} {[int(t.numpy()[0]) for t in gathered]}"
    Path(folder, str(dist.get_rank())).write_text(text)


def fail_on_rank_1(scheme: str) -> None:
    import importlib

    dist = importlib.import_module(scheme)
    dist.init_parallel_env()
    if dist.get_rank() == 1:
        raise ValueError("this rank has had enough")
    dist.barrier()


def end_as_told(how: str) -> None:
    collective.init_parallel_env()
    collective.barrier()
    if collective.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "at length":
            raise ValueError("x" * 1_000_000 + " and that is all")
    sys.exit(0)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        pytest.param("killed", "^rank 1 was killed by signal 9$", marks=pytest.mark.long),
        ("at length", "^rank 1 ended with exit code 1\n.* and that is all$"),
    ],
)
def test_however_a_rank_fails_it_is_named(how: str, text: str) -> None:
    with pytest.raises(ProcessFailed) as caught:
        collective.spawn(end_as_told, args=(how,), nprocs=2)
    assert re.search(text, str(caught.value), re.DOTALL)


@pytest.mark.long
def test_a_rank_may_exit_with_0() -> None:
    collective.spawn(end_as_told, args=("well",), nprocs=2)


@pytest.mark.parametrize(
    "module", [pytest.param(ps, id="ps", marks=pytest.mark.long), pytest.param(collective, id="collective")]
)
def test_ranks_talk_to_each_other(module: object, tmp_path: Path) -> None:
    module.spawn(average_ranks, args=(module.__name__, str(tmp_path)), nprocs=3)  # type: ignore[attr-defined]
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == "3 [3.0, 30.0] [0, 1, 2]"


@pytest.mark.parametrize(
    "module", [pytest.param(ps, id="ps", marks=pytest.mark.long), pytest.param(collective, id="collective")]
)
def test_the_rank_that_failed_is_named_with_its_traceback(module: object) -> None:
    with pytest.raises(ProcessFailed, match="rank 1 ended with exit code 1") as caught:
        module.spawn(fail_on_rank_1, args=(module.__name__,), nprocs=2)  # type: ignore[attr-defined]
    assert "ValueError: this rank has had enough" in str(caught.value)
