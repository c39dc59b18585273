"""Two threads share the pieces of an update."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from common.system.memory import aligned_empty
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket
from ps.store import update_for_built_in as module
from ps.store.contributions import Contributions
from ps.store.shards import Shard
from ps.store.update_for_built_in import UpdateInPieces

PIECES = module.WORTH_HELP
FIRST_TWO = (0, 16)  # where they begin: each thread takes one of them


def averages_of(values: FloatArray) -> Contributions:
    """One trainer's, not averaged yet; it came in two messages, with parts of the second piece in both."""
    contributions = Contributions(Shard(0, values.size), [Bucket(0, values.size)], [0], piece=16)
    contributions.add(0, 0, 0, 0, values[:20])
    contributions.add(0, 0, 0, 20, values[20:])
    return contributions


class Recorder:
    """An optimizer; both threads meet in it."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.both = fails, threading.Barrier(2, timeout=30)
        self.rate, self.seen, self.threads = 0.0, dict[int, FloatArray](), set[str]()

    def set_rate(self, learning_rate: float) -> None:
        self.rate = learning_rate

    def step(self, start: int, gradients: FloatArray) -> None:
        if start in FIRST_TWO:
            self.both.wait()
        self.threads.add(threading.current_thread().name)
        if threading.current_thread().name == self.fails:
            raise ZeroDivisionError
        assert start not in self.seen
        self.seen[start] = gradients.copy()


def test_two_threads_share_the_pieces() -> None:
    values, recorder = np.arange(16 * PIECES, dtype=np.float32), Recorder()
    contributions = averages_of(values)
    with ThreadPoolExecutor(1, "gradsync-helper") as helper:
        UpdateInPieces(contributions, recorder, helper=helper).apply(0.1, contributions.pieces())
    assert recorder.rate == 0.1
    assert len(recorder.threads) == 2
    np.testing.assert_array_equal(np.concatenate([recorder.seen[16 * n] for n in range(PIECES)]), values)


@pytest.mark.parametrize("fails", ["gradsync-helper_0", threading.main_thread().name])
def test_an_error_in_either_thread_is_raised(fails: str) -> None:
    contributions = averages_of(np.zeros(16 * PIECES, np.float32))
    with ThreadPoolExecutor(1, "gradsync-helper") as helper, pytest.raises(ZeroDivisionError):
        UpdateInPieces(contributions, Recorder(fails), helper=helper).apply(0.1, contributions.pieces())


def test_each_thread_has_memory_for_the_longest_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def empty(count: int) -> FloatArray:
        made.append(count)
        return aligned_empty(count)

    monkeypatch.setattr(module, "aligned_empty", empty)
    contributions = averages_of(np.zeros(40, np.float32))  # the last one is shorter
    UpdateInPieces(contributions, Recorder())
    assert made == [16]
    with ThreadPoolExecutor(1) as helper:
        UpdateInPieces(contributions, Recorder(), helper=helper)
    assert made == [16] * 3
