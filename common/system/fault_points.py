"""Named places at which a process kills or stops itself when a test asks for it: GRADSYNC_FAULT.

    GRADSYNC_FAULT=pushed:1:3        for a launcher: rank 1 is killed when it has pushed a bucket of step 3
    GRADSYNC_FAULT=stored:s0:3:stop  server 0 is stopped (SIGSTOP) when it has stored a bucket of step 3
    GRADSYNC_FAULT=pushed:1:3,,joined:0:0   one for each life of a job that is started again; here the first and third

The launcher tells the one process concerned, in GRADSYNC_FAULT_HERE=pushed:3; for all others `reach` takes
some 0.1 us.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from common.errors import UsageError, choose

__all__ = [
    "FAULT_HERE_VARIABLE",
    "FAULT_VARIABLE",
    "POINTS",
    "Fault",
    "begin_life",
    "fault_for",
    "reach",
    "reach_stage",
]

FAULT_VARIABLE = "GRADSYNC_FAULT"
FAULT_HERE_VARIABLE = "GRADSYNC_FAULT_HERE"
ANY = "any"
RING, TRAINER, SERVER = "ring", "trainer", "server"
COMMIT_FILES = ("part", "manifest")  # rank 0 alone writes manifests
STAGES = ("written", "synced", "renamed")  # of a file: beside its name, on the disk, in place
POINTS: Mapping[str, str] = {  # and who comes there
    "joining": ANY,  # step 0: nobody has heard of it yet
    "joined": ANY,  # step 0: its group is complete
    "backward": ANY,  # in the built-in training: gradients are there; steps count from where this life began
    "leaving": ANY,  # step 0: all is done, and nobody has been told
    "introduced": RING,  # step 0: all have come, and nobody is connected with anybody
    "before-reduce": RING,
    "sending": RING,  # over TCP: nothing of this message is out
    "sent": RING,  # as far as the kernel took it at once
    "receiving": RING,  # the header has come
    "before-barrier": RING,
    "before-push": TRAINER,
    "pushed": TRAINER,
    "before-commit": TRAINER,
    "committed": TRAINER,  # the servers have been told, nothing has come back
    "received": TRAINER,  # the step's result
    "got-push": SERVER,  # a bucket has come, nothing is done with it
    "stored": SERVER,  # it is kept; where it was the last, all are summed
    "got-commit": SERVER,
    "before-reply": SERVER,  # the update is made
    "replied": SERVER,
    **{f"{file}-{stage}": ANY for file in COMMIT_FILES for stage in STAGES},  # the step that a commit is of
}
ACTIONS = ("kill", "stop", "exit")


@dataclass(frozen=True)
class Fault:
    """What is to happen once, at a point of a step.

    Args:
        action: kill (SIGKILL), stop (SIGSTOP), or exit: end without a word to anyone, with code 1.
    """

    point: str
    step: int
    action: str = "kill"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Of `POINT:STEP[:ACTION]`.

        Raises:
            UsageError: it is not that.
        """
        point, _, rest = text.partition(":")
        step, _, action = rest.partition(":")
        if not step.isdigit():
            raise UsageError(f"a fault must be POINT:WHO:STEP[:ACTION], as in pushed:1:3:kill (got step {step!r})")
        return cls(choose("fault point", point, POINTS), int(step), choose("action", action or "kill", ACTIONS))

    def __str__(self) -> str:
        return f"{self.point}:{self.step}:{self.action}"

    def strike(self) -> None:
        os.write(2, f"{FAULT_HERE_VARIABLE}={self} at {time.monotonic():.6f} s\n".encode())
        if self.action == "exit":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def fault_for(who: str, life: int, text: str) -> str:
    """What a launcher tells a process of a job: its fault in this life, as `Fault.parse` takes it, or "".

    Args:
        who: "rank 1" or "server 0".
        text: the launcher's own GRADSYNC_FAULT.

    Raises:
        UsageError: it is none.
    """
    of_lives = text.split(",")
    if life >= len(of_lives) or not of_lives[life]:
        return ""
    point, _, rest = of_lives[life].partition(":")
    whom, _, when = rest.partition(":")
    fault = str(Fault.parse(f"{point}:{when}"))
    return fault if who == (f"server {whom[1:]}" if whom.startswith("s") else f"rank {whom}") else ""


def reach(point: str, step: int) -> None:
    """This process has come to a point of that step."""
    if (fault := fault_here()) and point == fault.point and step == fault.step and not has_struck:
        has_struck.append(fault)
        fault.strike()


def reach_stage(file: str, step: int, stage: str) -> None:
    """Likewise, within the writing of one of COMMIT_FILES."""
    reach(f"{file}-{stage}", step)


def begin_life(who: str, life: int) -> None:
    """This process, which is called so, outlives another one: from now on its faults are those of that life."""
    os.environ[FAULT_HERE_VARIABLE] = fault_for(who, life, os.environ.get(FAULT_VARIABLE, ""))
    fault_here.cache_clear()
    has_struck.clear()


@cache
def fault_here() -> Fault | None:
    """This process's."""
    text = os.environ.get(FAULT_HERE_VARIABLE)
    return Fault.parse(text) if text else None


has_struck: list[Fault] = []
