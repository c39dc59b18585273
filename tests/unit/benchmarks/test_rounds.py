"""Rounds within a job: a turn for each, what was found is kept after it, and gone on from."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measuring.rounds import ROUNDS_FILE, TURN, TURNS_VARIABLE, rounds
from benchmarks.records.compare import CompareResults
from benchmarks.records.result_files import plain
from benchmarks.suites.job_file import Part
from benchmarks.suites.part import Outcome, rounds_made, take_up
from common.errors import GradSyncError
from tests.support.compare_samples import a_run, results_of
from tests.support.typed_results import typed


class Measurement:
    """Whose every round finds its own number."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, []  # type: ignore[var-annotated]

    def make(self, count: int) -> Iterator[int]:
        for number in rounds(
            count,
            self.folder,
            state=lambda: self.found,
            restore=self.found.extend,
            so_far=lambda: {"rounds": len(self.found)},
        ):
            self.found.append(number)
            yield number

    def kept(self) -> Any:
        return json.loads((self.folder / ROUNDS_FILE).read_text())


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "turns"))
        listener.listen(1)
        listener.settimeout(10)
        monkeypatch.setenv(TURNS_VARIABLE, str(tmp_path / "turns"))
        yield listener


def test_alone_there_is_nobody_to_wait_for_and_nothing_is_kept(tmp_path: Path) -> None:
    assert [*Measurement(tmp_path).make(3)] == [0, 1, 2]
    assert not any(tmp_path.iterdir())


def test_within_a_job_each_round_waits_for_its_turn(tmp_path: Path, job: socket.socket) -> None:
    measurement = Measurement(tmp_path)
    making = measurement.make(3)
    assert next(making) == 0  # with its first turn a part is started
    with job.accept()[0] as turns:
        turns.settimeout(10)
        turns.sendall(TURN)  # given early, so that this thread can be both sides
        assert next(making) == 1
        assert measurement.kept() == {"made": 1, "count": 3, "state": [0], "results": {"rounds": 1}}
        assert turns.recv(9) == TURN
        turns.sendall(TURN)
        assert next(making) == 2
        assert turns.recv(9) == TURN
        assert next(making, None) is None
        assert measurement.kept() == {"made": 3, "count": 3, "state": [0, 1, 2], "results": {"rounds": 3}}
        assert turns.recv(9) == b""  # no other round is asked for


def test_a_part_whose_job_has_ended_ends_too(tmp_path: Path, job: socket.socket) -> None:
    making = Measurement(tmp_path).make(3)
    next(making)
    job.accept()[0].close()
    with pytest.raises(GradSyncError, match=r"^the job that this measurement is a part of has ended$"):
        next(making)


@pytest.mark.parametrize(("made", "left"), [(1, [1, 2]), (2, [2]), (3, [2])])
def test_what_was_kept_is_gone_on_from(made: int, left: list[int], tmp_path: Path, job: socket.socket) -> None:
    """With one more round at least: a program's last parameters, for one, are nowhere else."""
    kept = {"made": made, "count": 3, "state": [*"abc"[:made]], "results": None}
    (tmp_path / ROUNDS_FILE).write_text(json.dumps(kept))
    measurement = Measurement(tmp_path)
    making = measurement.make(3)
    numbers = [next(making)]
    with job.accept()[0] as turns:
        turns.sendall(TURN * 3)
        numbers += making
    assert numbers == left
    assert measurement.found == [*"abc"[:made], *left]


def test_rounds_of_a_training_that_diverged_are_gone_on_from(tmp_path: Path) -> None:
    run = {**a_run("ps N=2", 900), "loss": {"first": 2.3, "last": float("nan")}}
    kept = {"made": 2, "count": 3, "state": [], "results": plain(typed(results_of(run)))}
    (tmp_path / ROUNDS_FILE).write_text(json.dumps(kept))
    share, words, results = rounds_made(tmp_path)
    assert (share, words) == (2 / 3, " after 2 of 3 rounds")
    assert isinstance(results, CompareResults)
    assert math.isnan(results.runs[0].loss.last)
    (tmp_path / "part.json").write_text(json.dumps({"status": "begun", "seconds": 5.0, "fingerprint": "print"}))
    outcome = Outcome(Part(name="one", title="One", words=()), "")
    assert take_up(outcome, tmp_path, "print")
    assert outcome.resumed


@pytest.mark.parametrize("text", ["", "{", "[]", '{"made": 1, "count": 3, "results": 7}'])
def test_rounds_that_cannot_be_read_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / ROUNDS_FILE).write_text(text)
    assert rounds_made(tmp_path) == (0.0, "", None)
