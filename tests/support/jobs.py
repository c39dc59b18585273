"""Short programs to be run as the processes of a job."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.launch.child import Child, ProcessFailed
from common.launch.job import Job

__all__ = ["LIMIT_S", "PAUSE", "WAIT_FOR_END_OF", "ByHand", "Flags", "failure_of", "start"]

LIMIT_S = 40.0
PAUSE = "import signal; signal.pause()"
WAIT_FOR_END_OF = """
import os, sys, time
while True:  # a zombie still counts as alive: this ends once the job has seen the end
    try:
        os.kill(int(sys.argv[1]), 0)
    except ProcessLookupError:
        sys.exit(int(sys.argv[2]))
    time.sleep(0.001)
"""


def start(job: Job, rank: int, code: str, *args: object) -> subprocess.Popen[bytes]:
    return job.start(f"rank {rank}", ["-c", code, *map(str, args)], log=f"workerlog.{rank}")


def failure_of(job: Job) -> ProcessFailed:
    with pytest.raises(ProcessFailed) as caught:
        job.wait()
    return caught.value


class ByHand(ABC):
    """Ranks that only sleep: what they note, and how they end."""

    @abstractmethod
    def rank(self, rank: int) -> Child: ...

    def note(self, rank: int, *lines: str) -> None:
        with self.rank(rank).joined.open("a") as out:
            out.writelines(f"{line}\n" for line in lines)

    def kill(self, rank: int) -> None:
        self.rank(rank).process.kill()
        self.rank(rank).process.wait()


@dataclass(frozen=True)
class Flags:
    name: str = "a"
    hidden_size: int = 3
    fast: bool = False
    slow: bool = True
    path: Path | None = None
