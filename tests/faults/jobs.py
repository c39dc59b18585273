"""Real jobs of both schemes that fail, or are to be failed by somebody."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from common.launch.ranks import abstract_address
from tests.support.commands import JOB, Started, start_server, until

__all__ = ["LAUNCHERS", "SCHEMES", "TOGETHER_S", "Once", "Start", "end_together", "started_ranks"]

Start = Callable[..., Started]
Once = Callable[[str, Callable[[], str]], str]  # a name, and what makes the text if nobody has
SCHEMES = ("ps", "collective")
LAUNCHERS: dict[str, list[object]] = {
    "ps": ["ps.run", "--trainers", 2, "--servers", 1],
    "collective": ["collective.run", "--nranks", 2],
}
TOGETHER_S = 5.0  # from the first end of a group that has failed to the last


def started_ranks(
    start: Start,
    scheme: str,
    nranks: int,
    *each: Sequence[object],
    through: Mapping[int, str] | None = None,
    server_flags: Sequence[object] = (),
) -> list[Started]:
    """A rank with each of these flags; under `ps` also their server, which comes first.

    Args:
        nranks: of the server, and of ranks whose flags do not say another number.
        through: modules that start some of them instead, given the trainer's module and flags.
    """
    if scheme == "ps":
        server, address = start_server(start, nranks, *server_flags)
        begun, where = [server], ["ps.trainer", "--servers", address]
    else:
        begun, where = [], ["collective.trainer", "--rendezvous", abstract_address("test")]
    for index, flags in enumerate(each):
        number = [] if "--nranks" in flags else ["--nranks", nranks]
        by = [through[index]] if through and index in through else []
        begun.append(start(*by, *where, *JOB, *number, *flags))
    return begun


def end_together(processes: Sequence[Started]) -> float:
    """Wait until all have ended, none much later than the first; when the first did (monotonic seconds)."""
    ends: dict[int, float] = {}

    def all_ended() -> bool:
        for index, each in enumerate(processes):
            if index not in ends and each.process.poll() is not None:
                ends[index] = time.monotonic()
        return len(ends) == len(processes)

    until(all_ended, "the end of all processes")
    first = min(ends.values())
    assert max(ends.values()) - first < TOGETHER_S, {processes[index].name: at - first for index, at in ends.items()}
    return first
