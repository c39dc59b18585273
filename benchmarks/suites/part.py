"""One part of a job: a command that makes a round whenever it is given a turn, and what becomes of it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.measuring.rounds import ROUNDS_FILE, TURN, TURNS_VARIABLE
from benchmarks.records.environment import cpu_name
from benchmarks.records.faults import FaultsResults
from benchmarks.records.programs import ProgramsResults
from benchmarks.records.progress import PROGRESS_VARIABLE, told_by
from benchmarks.records.result_files import read
from benchmarks.records.scale import ScaleResults
from benchmarks.records.suite import PartRecord, PartResults, Status, SuiteResults
from benchmarks.suites.job_file import Part
from common.errors import CertificateFailed, DataError
from common.launch.job import Job
from common.system.atomic_file import write_file
from common.system.mkl import wanted_cpu_type

__all__ = ["Outcome", "RunningPart", "fingerprint", "keep", "take_up"]

POLL_S = 0.2
RESULT_FILES = ("results.json", "script.json", "sweep.json", "accuracy.json", "crossover.json")
TOLD = "progress"  # the file in which a part tells how far it is
PACKAGES = ("benchmarks", "collective", "common", "ps")


class RoundsMade(msgspec.Struct):
    """What a part leaves after each of its rounds."""

    made: int
    count: int
    results: PartResults | None


@dataclass
class Outcome:
    """What has become of a part.

    Args:
        status: "missing" until it has ended; then "done", "failed", "wrong" (its certificate failed), or "absent" if
            this machine cannot run it; "incomplete" if the job ended before all of its rounds were made.
        results: what its JSON holds, if it wrote one; of a wrong part only what has no speed.
        resumed: whether its folder holds rounds to go on from.
    """

    part: Part
    command: str
    status: Status = "missing"
    reason: str = "not run"
    seconds: float = 0.0
    results: PartResults | None = None
    resumed: bool = False

    def record(self) -> PartRecord:
        return PartRecord(
            name=self.part.name,
            title=self.part.title,
            command=self.command,
            status=self.status,
            reason=self.reason,
            seconds=self.seconds,
            results=self.results,
        )


class RunningPart:
    """A part as a child of the job, which makes a round whenever it is given a turn; a context manager. What it prints
    is in its log.txt.

    Args:
        folder: its own, in the folder of the job.
        words: its command, after `python`.
        print_of_part: its fingerprint.
        show: shows what the part does now.
    """

    def __init__(
        self,
        job: Job,
        outcome: Outcome,
        *,
        folder: Path,
        words: Sequence[str],
        print_of_part: str,
        show: Callable[[str], None],
    ) -> None:
        self.outcome, self.ended = outcome, False
        self._job, self._folder, self._words, self._print, self._show = job, folder, words, print_of_part, show
        self.begun = False
        self._child: subprocess.Popen[bytes] | None = None
        self._resources, self._turns = ExitStack(), socket.socket(socket.AF_UNIX)

    def __enter__(self) -> RunningPart:
        self._resources.enter_context(self._turns)
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def share(self) -> float:
        """Of its rounds, those that it has made."""
        return rounds_made(self._folder)[0] if self.begun or self.outcome.resumed else 0.0

    def take_turn(self) -> None:
        """Returns when it has made a round, or has ended, which the outcome then tells."""
        begun, before = time.monotonic(), self.outcome.seconds
        if self._child is None:
            self._child, self.begun = self._start(), True
        else:
            with suppress(OSError):  # it has died while it waited
                self._turns.sendall(TURN)
        late = False
        while not late and self._child.poll() is None:
            self.outcome.seconds = before + time.monotonic() - begun
            if self._has_made_a_round():
                keep(self.outcome, self._folder, self._print, begun=True)
                return
            self._show(told_by(self._folder / TOLD))
            late = self.outcome.seconds > 60 * self.outcome.part.limit
        self._job.end(self._child)
        self.ended = True
        (self._folder / TOLD).unlink(missing_ok=True)
        judge(self.outcome, self._folder, 0 if late else self._child.returncode, late=late)
        keep(self.outcome, self._folder, self._print)
        (self._folder / ROUNDS_FILE).unlink(missing_ok=True)

    def interrupt(self) -> None:
        """The job has ended: what there is of a part that has not, it has in whole rounds."""
        if self.ended or not (self.begun or self.outcome.resumed):
            return
        (self._folder / TOLD).unlink(missing_ok=True)
        _, words, results = rounds_made(self._folder)
        self.outcome.reason, self.outcome.results = f"interrupted{words}", results
        self.outcome.status = "incomplete" if results else "missing"

    def _start(self) -> subprocess.Popen[bytes]:
        if not self.outcome.resumed:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        keep(self.outcome, self._folder, self._print, begun=True)
        address = self._job.scratch / f"turns-{secrets.token_hex(4)}"  # short: it is a socket's
        self._turns.bind(str(address))
        self._turns.listen(1)
        environment = {PROGRESS_VARIABLE: str(self._folder / TOLD), TURNS_VARIABLE: str(address)}
        name = self.outcome.part.name
        return self._job.start(name, self._words, log=f"{name}/log.txt", environment=environment)

    def _has_made_a_round(self) -> bool:
        """Waits a little."""
        if not select.select([self._turns], (), (), POLL_S)[0]:
            return False
        if self._turns.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listener, self._turns = self._turns, self._turns.accept()[0]
            listener.close()
            self._resources.enter_context(self._turns)
            return False
        with suppress(ConnectionResetError):  # it has died with a turn unread
            if self._turns.recv(1):
                return True
        with suppress(subprocess.TimeoutExpired):  # all rounds are made: it writes its report
            assert self._child
            self._child.wait(POLL_S)
        return False


def judge(outcome: Outcome, folder: Path, code: int, *, late: bool) -> None:
    """Note what has become of a part that has ended."""
    outcome.results = load_results(folder)
    if late:
        _, words, made = rounds_made(folder)
        outcome.results = outcome.results or made
        outcome.status, outcome.reason = "failed", f"it took longer than {outcome.part.limit:g} minutes (limit){words}"
    elif code:
        outcome.status, outcome.reason = "failed", reason_in(folder / "log.txt", code)
        if code == CertificateFailed.exit_code:
            outcome.status = "wrong"
            if getattr(outcome.results, "runs", None) != []:
                outcome.results = None
    elif outcome.results is None:
        outcome.status, outcome.reason = "failed", "it ended well but left no results"
    else:
        outcome.status, outcome.reason = "done", ""


def rounds_made(folder: Path) -> tuple[float, str, PartResults | None]:
    """Of all rounds the share that a part has made, the same in words, and the results that they make."""
    try:  # json.loads, for the loss of a training that diverged is NaN
        kept = msgspec.convert(json.loads((folder / ROUNDS_FILE).read_text()), RoundsMade, str_keys=True)
    except (OSError, ValueError, msgspec.ValidationError):
        return 0.0, "", None
    return kept.made / kept.count, f" after {kept.made} of {kept.count} rounds", kept.results


def reason_in(log: Path, code: int) -> str:
    """The error in a command's own words, else the last line that it printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line.partition(": ")[2] for line in lines if line.startswith("benchmarks ")]
    return next(iter([*own[-1:], *lines[-1:]]), f"exit code {code} without a word")


def load_results(folder: Path) -> PartResults | None:
    """The results that a part's folder holds; None if there are none, or not to their end."""
    for name in RESULT_FILES:
        try:
            found = read(folder / name)
        except DataError:
            continue
        if not isinstance(found, (SuiteResults, FaultsResults, ScaleResults, ProgramsResults)):
            return found
    return None


def keep(outcome: Outcome, folder: Path, print_of_part: str, *, begun: bool = False) -> None:
    """For --resume."""
    status = "begun" if begun else outcome.status
    content = {"status": status, "seconds": outcome.seconds, "fingerprint": print_of_part}
    write_file(folder / "part.json", json.dumps(content) + "\n")


def take_up(outcome: Outcome, folder: Path, print_of_part: str) -> bool:
    """What an earlier run has measured well with the same command, sources and machine, all of it or some rounds; False
    if with others."""
    try:
        kept = json.loads((folder / "part.json").read_text())
    except (OSError, ValueError):
        return True
    results = load_results(folder)
    complete = kept.get("status") == "done" and results is not None
    some = kept.get("status") == "begun" and rounds_made(folder)[0] > 0
    if not complete and not some:
        return True
    if kept.get("fingerprint") != print_of_part:
        return False
    outcome.seconds = kept["seconds"]
    if complete:
        outcome.status, outcome.reason, outcome.results = "done", "", results
    outcome.resumed = some
    return True


def fingerprint(part: Part) -> str:
    """Of all that a result depends on: the command, the program, our sources (a commit may be dirty), the machine and
    its matrix kernels."""
    sources = [path for package in PACKAGES for path in sorted((Path(__file__).parents[2] / package).rglob("*.py"))]
    digest = hashlib.sha256()
    for path in [*sources, *([part.script] if part.script and part.script.is_file() else [])]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    machine = [cpu_name(), len(os.sched_getaffinity(0)), wanted_cpu_type()]
    told = [part.words, part.arguments, *machine, sys.version]
    digest.update(json.dumps(told).encode())
    return digest.hexdigest()
