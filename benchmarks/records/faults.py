"""faults.json: what was done to jobs on purpose, and whether what is promised came."""

from __future__ import annotations

from msgspec import Struct

from benchmarks.records.results import Results

__all__ = ["FaultOutcome", "FaultsResults", "Recovery", "Usage"]


class Recovery(Struct, frozen=True):
    """
    Args:
        whole_s: from a kill until the group was complete again, seconds.
        starting_s: of that, the start of the killed process's successor: its interpreter and its imports, until it
            began to join, or, as a server, listened; and until all others had done so for the first time.
        replayed: complete steps that were made again while the others kept their processes; None: all were started
            again.
        stayed: whether all others did.
    """

    whole_s: float
    starting_s: float
    replayed: int | None = None
    stayed: bool = False


class Usage(Struct, frozen=True):
    """What a process had.

    Args:
        who: "rank 1", "server 0" or "launcher".
        memory_mb: its own alone (USS).
    """

    who: str
    memory_mb: float
    descriptors: int
    threads: int


class FaultOutcome(Struct, frozen=True, kw_only=True):
    """One case.

    Args:
        row: of the table of faults, 1 to 21.
        scheme, backend: of the job; the backend of a simulated one is "simulated". In results of before, which had only
            servers simulated, both are "" of those.
        promise: in words.
        times: how often it was made; kept: how often what is promised came.
        detection_s: of each process that noticed, from the fault on, seconds.
        recoveries: of each kill after which the group came together again.
        usage: of a soak: of all processes, just before each kill.
        why_not: the first time that it did not come.
        skipped: why it was not made; "" if it was.
    """

    row: int
    name: str
    scheme: str
    backend: str
    promise: str
    times: int = 0
    kept: int = 0
    detection_s: list[float] = []
    recoveries: list[Recovery] = []
    usage: list[list[Usage]] = []
    why_not: str = ""
    skipped: str = ""


class FaultsResults(Results, frozen=True, kw_only=True, tag="faults"):
    outcomes: list[FaultOutcome]
