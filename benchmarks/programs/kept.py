"""Paddle's runs of an earlier call, kept so that only ours need be run again."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import structs

from benchmarks.programs.manifest import Program
from benchmarks.programs.records import Recorded, read_records
from benchmarks.records.environment import installed
from benchmarks.records.programs import Outcome
from common.system.atomic_file import write_file

__all__ = ["Kept"]

OUTCOME = "outcome.json"


class Kept:
    """Runs in a folder, each with its outcome; of another version of the program or of Paddle they are not taken.

    Args:
        reuse: take those that are there; otherwise every one is made anew.
    """

    def __init__(self, folder: Path, *, reuse: bool) -> None:
        self._folder, self._reuse = folder, reuse

    def run(
        self, program: Program, nranks: int, number: int, make: Callable[[Path], tuple[Outcome, Recorded]]
    ) -> tuple[Outcome, Recorded]:
        """The run of that number, from 1; made in the folder that `make` is given, if it is not there yet."""
        name = f"{program.name}-{key_of(program, nranks)}-{number}"
        folder, note = self._folder / name, self._folder / name / OUTCOME
        if self._reuse and note.exists():
            return msgspec.json.decode(note.read_bytes(), type=Outcome), read_records(folder)
        shutil.rmtree(folder, ignore_errors=True)
        outcome, found = make(folder)
        write_file(note, msgspec.json.encode(outcome))
        return outcome, found


def key_of(program: Program, nranks: int) -> str:
    """Of all that a run depends on."""
    program = structs.replace(program, settings="", waived="", seconds=0.0)
    content = msgspec.json.encode([program, nranks, installed("paddlepaddle")])
    return hashlib.sha256(content).hexdigest()[:12]
