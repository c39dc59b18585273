"""Small trainings under a launcher whose processes are killed, and what is looked at when they are over."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from common.commit.folder import CommitFolder
from common.launch.job import FOLDER
from common.system.atomic_file import UNFINISHED
from common.system.fault_points import FAULT_VARIABLE
from tests.faults.jobs import LAUNCHERS, Once, Start
from tests.support.commands import JOB, Started, can_listen, digest_in, until, watched

__all__ = [
    "AT",
    "COMMIT_EVERY",
    "PLANES",
    "STEPS",
    "Killed",
    "Run",
    "frozen_child",
    "left_by",
    "states_of",
    "undisturbed",
    "undisturbed_states",
]

STEPS, COMMIT_EVERY = 7, 2
AT = (0, 3, STEPS - 1)  # the first step, one in the middle, the last
LIMIT_S = 60.0
UNSEEDED = {"random.python", "random.numpy"}
PLANES = {"ps": ("shm", "tcp", "grpc"), "collective": ("shm", "tcp")}
PLANE_FLAG = {"ps": "--data-plane", "collective": "--backend"}
STRUCK = re.compile(r"^GRADSYNC_FAULT_HERE=\S+ at ([\d.]+) s$", re.MULTILINE)


@dataclass(frozen=True)
class Killed:
    """A job that is over.

    Args:
        digest: of its parameters; "": it has none.
        logs: of each process, by its file's name: all its lives.
        processes: how many the launcher had, its guard included.
    """

    started: Started
    digest: str
    commits: Path
    logs: dict[str, str]
    processes: int

    @property
    def err(self) -> str:
        return self.started.err

    def struck(self) -> list[float]:
        """When each of its faults came, in monotonic seconds."""
        return sorted(float(at) for log in self.logs.values() for at in STRUCK.findall(log))


Run = Callable[..., Killed]


@pytest.fixture
def run(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A training with these faults, to its end; `meanwhile` is given its launcher when that has been started."""

    def run(
        scheme: str,
        faults: str,
        *flags: object,
        plane: str = "shm",
        commits: bool = True,
        meanwhile: Callable[[Started], object] = lambda _: None,
    ) -> Killed:
        monkeypatch.setenv(FAULT_VARIABLE, faults)
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        files = ["--json", folder / "record.json", "--log-dir", folder / "logs", PLANE_FLAG[scheme], plane]
        kept = ["--checkpoint-dir", folder / "commits", "--commit-every", COMMIT_EVERY] if commits else []
        job = start(*LAUNCHERS[scheme], *JOB, "--steps", STEPS, *files, *kept, *flags)
        meanwhile(job)
        processes = watched(job, LIMIT_S)
        job.process.wait(0)
        digest = digest_in(folder / "record.json") if (folder / "record.json").exists() else ""
        logs = {file.name: file.read_text() for file in logs_in(folder)}
        return Killed(job, digest, folder / "commits", logs, processes)

    return run


def logs_in(folder: Path) -> list[Path]:
    return sorted((folder / "logs").glob("*log.*"))


def frozen_child(job: Started) -> psutil.Process:
    """Of a launcher's processes the one that a fault has stopped, once it has."""
    launcher = psutil.Process(job.process.pid)

    def frozen() -> psutil.Process | None:
        for each in launcher.children():
            with suppress(psutil.NoSuchProcess):
                if each.status() == psutil.STATUS_STOPPED:
                    return each
        return None

    found: psutil.Process = until(frozen, "a frozen process")
    return found


def undisturbed(run: Run, once: Once) -> str:
    """The digest without a fault: that of all schemes, planes, and however many commits."""

    def make() -> str:
        done = run("collective", "", commits=False)
        assert done.started.code == 0, done.err
        return done.digest

    return once("small training", make)


def undisturbed_states(scheme: str, run: Run, once: Once) -> dict[int, str]:
    """`states_of` a training under this scheme without a fault."""

    def make() -> str:
        done = run(scheme, "")
        assert done.started.code == 0, done.err
        return json.dumps(states_of(done))

    found = json.loads(once(f"states of a small training under {scheme}", make))
    return {int(step): state for step, state in found.items()}


def states_of(job: Killed) -> dict[int, str]:
    """SHA-256 of each commit, by its step: parameters, the optimizer's state, Paddle's random states, the place in the
    data. Nobody has seeded the generators of Python and NumPy."""
    commits, found = CommitFolder(job.commits), dict[int, str]()
    for step in commits.steps():
        manifest = commits.manifest(step)
        whole = hashlib.sha256(f"{manifest.epoch} {manifest.ahead} {manifest.parameters_sha256}".encode())
        for name in sorted(manifest.parts):
            part = commits.part(manifest, name)
            for key in sorted(set(part.arrays) - UNSEEDED):
                whole.update(f"{name} {key} {hashlib.sha256(part.arrays[key].tobytes()).hexdigest()}\n".encode())
        found[step] = whole.hexdigest()
    return found


def left_by(job: Killed) -> list[str]:
    """What there is of it that ought to be gone; its processes are looked for by whoever has started it."""
    mine = f"{FOLDER}{job.started.process.pid}-"
    found = [str(folder) for folder in Path(tempfile.gettempdir()).glob(f"{mine}*")]
    ports = [int(port) for log in job.logs.values() for port in re.findall(r" listens on \S+:(\d+)", log)]
    found += [f"port {port}" for port in ports if not can_listen(port)]
    commits = CommitFolder(job.commits)
    found += [str(file) for file in job.commits.rglob(f"*{UNFINISHED}")]
    found += [f"half a commit of step {step}" for step in commits.begun() if step not in commits.steps()]
    for step in commits.steps():
        commits.verify(step)
    return found
