"""How a pool hears its workers: in whatever order they answer, and no longer than all of them live."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.training.pool import Worker, hear_all
from common.errors import GradSyncError, LayoutMismatch


class Process:
    """The end of a pipe that a worker would write to."""

    returncode: int | None = None

    def __init__(self, stack: ExitStack) -> None:
        ends = os.pipe()
        self.stdout, self._answers = (stack.enter_context(os.fdopen(e, m)) for e, m in zip(ends, "rw", strict=True))

    def answer(self, **content: Any) -> None:
        self._answers.write(json.dumps(content) + "\n")
        self._answers.flush()

    def die(self) -> None:
        self._answers.close()

    def wait(self) -> int:
        self.returncode = -9
        return -9


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    with ExitStack() as stack:
        yield [Process(stack) for _ in range(2)]


def workers(processes: list[Process]) -> list[Worker]:
    return [Worker(f"rank {rank}", process) for rank, process in enumerate(processes)]  # type: ignore[arg-type]


def test_answers_come_in_the_workers_order(processes: list[Process]) -> None:
    for rank in (1, 0):
        processes[rank].answer(done=rank)
    assert hear_all(workers(processes)) == [0, 1]


def test_a_cause_is_told_before_its_consequence(processes: list[Process]) -> None:
    processes[0].answer(error=["PeerLost", "rank 1 left"])
    processes[1].answer(error=["LayoutMismatch", "other flags"])
    with pytest.raises(LayoutMismatch, match="other flags"):
        hear_all(workers(processes))


def test_a_death_ends_the_wait_for_one_who_never_answers(processes: list[Process]) -> None:
    processes[1].die()
    with pytest.raises(GradSyncError, match=r"^the worker for rank 1 died \(exit code -9\)$"):
        hear_all(workers(processes))
