"""The rounds of a measurement, of which each measures all contestants once.

Within a job its parts take turns, a round each: so a machine that drifts for an hour does so within every interval, and
not between two parts. What a part has found after each of its rounds is kept, for the report of a job that was
interrupted and for --resume.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import GradSyncError
from common.system.atomic_file import write_file

__all__ = ["ROUNDS_FILE", "TURN", "TURNS_VARIABLE", "rounds"]

TURNS_VARIABLE = "GRADSYNC_TURNS"  # the Unix socket over which a job gives a part its turns
ROUNDS_FILE = "rounds.json"  # what a part has found so far
TURN = b"."  # from the part: a round is made; from the job: make another one


def rounds(
    count: int,
    folder: Path,
    *,
    state: Callable[[], Any],
    restore: Callable[[Any], None],
    so_far: Callable[[], object],
) -> Iterator[int]:
    """The numbers, from 0, of the rounds that are left to make; within a job a round waits for its turn.

    Args:
        folder: where a job keeps `rounds.json`: rounds made and asked for, state, and results so far.
        state: what was measured so far, as JSON can carry it.
        restore: takes up such a state, before the first round.
        so_far: the results that it makes, in the form in which all rounds' are written; None if they are not for use.

    Raises:
        GradSyncError: the job has ended.
    """
    if not (address := os.environ.pop(TURNS_VARIABLE, None)):  # a measured program's own benchmarks are not the part
        yield from range(count)
        return
    file = folder / ROUNDS_FILE
    made = 0
    if file.exists():
        kept = json.loads(file.read_text())
        made = min(kept["made"], count - 1)  # one at least, for what no state holds
        restore(kept["state"])
    with socket.socket(socket.AF_UNIX) as job:
        with suppress(OSError):  # then it has ended, which the first wait finds out
            job.connect(address)
        for number in range(made, count):
            if number > made:
                wait_for_turn(job)
            yield number
            content = {"made": number + 1, "count": count, "state": state(), "results": so_far()}
            write_file(file, json.dumps(content) + "\n")


def wait_for_turn(job: socket.socket) -> None:
    """However long that takes: the job has its limits, and its end ends the wait."""
    try:
        job.sendall(TURN)
        given = job.recv(1)
    except OSError:
        given = b""
    if not given:
        raise GradSyncError("the job that this measurement is a part of has ended")
