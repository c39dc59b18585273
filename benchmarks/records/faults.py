"""faults.json: what was done to jobs on purpose, and whether what is promised came."""

from __future__ import annotations

from msgspec import Struct

from benchmarks.records.results import Environment

__all__ = ["FaultOutcome", "FaultsResults"]


class FaultOutcome(Struct, frozen=True, kw_only=True):
    """One case.

    Args:
        row: of the table of faults, 1 to 21.
        scheme, backend: of the job; "" of the simulator, which has all modes of servers.
        promise: in words.
        times: how often it was made; kept: how often what is promised came.
        detection_s: of each process that noticed, from the fault on, seconds.
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
    why_not: str = ""
    skipped: str = ""


class FaultsResults(Struct, frozen=True, kw_only=True):
    created: str
    command: str
    environment: Environment
    outcomes: list[FaultOutcome]
