"""The clocks of a training's processes, compared for a trace.

Where hosts differ, so do clocks. What one reads more than rank 0's is bounded by messages there and back (Cristian,
"Probabilistic clock synchronization", 1989), at the beginning of a training and at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from common.sync.synchronizer import Synchronizer
from common.sync.trace import Reading, Recorder, ServerAnswer

__all__ = ["compare_clocks", "reading_of", "reading_of_server"]

IDENTITY_BYTES = 64
ROUNDS = 16  # of messages there and back


def compare_clocks(synchronizer: Synchronizer) -> None:
    """Note in the synchronizer's trace, if it records one, how all clocks differ from rank 0's. Called by all ranks,
    not within a step."""
    recorder = synchronizer.trace
    if not isinstance(recorder, Recorder):
        return
    mine = np.frombuffer(recorder.host.encode().ljust(IDENTITY_BYTES), np.uint8)
    hosts = synchronizer.all_gather(mine)
    reading = reading_of(synchronizer, recorder.clock) if (hosts != mine).any() else None
    recorder.readings.append(reading if reading and (hosts[0] != mine).any() else (recorder.clock(), 0, 0))
    if synchronizer.rank == 0:
        asked = [synchronizer.traced_servers.ask_servers() for _ in range(ROUNDS)]
        recorder.of_servers = recorder.of_servers or [[] for _ in asked[0]]
        for readings, answers in zip(recorder.of_servers, zip(*asked, strict=True), strict=True):
            readings.append(reading_of_server(answers, recorder.host))


def reading_of(synchronizer: Synchronizer, clock: Callable[[], int]) -> Reading:
    """This rank's clock against rank 0's; called by all ranks.

    Nobody leaves an all-gather before everybody has entered it. So what a rank reads before one is less, in true time,
    than what another reads after it; that bounds the difference of the two clocks from both sides.
    """
    least, most = -(1 << 62), 1 << 62
    before = after = previous = 0
    for number in range(ROUNDS + 1):
        before, previous = clock(), before
        everyone = synchronizer.all_gather(np.array([before, after], np.int64))
        after = clock()
        first_before, first_after = (int(value) for value in everyone[0])
        most = min(most, after - first_before)
        if number:
            least = max(least, previous - first_after)
    return (after, *between(least, most)) if synchronizer.rank else (after, 0, 0)


def reading_of_server(answers: Sequence[ServerAnswer], host: str) -> Reading:
    """A server's clock against the caller's, which is that of `host`, from several answers."""
    if answers[-1].host == host:
        return answers[-1].theirs, 0, 0
    least, most = max(a.theirs - a.after for a in answers), min(a.theirs - a.before for a in answers)
    return answers[-1].theirs, *between(least, most)


def between(least: int, most: int) -> tuple[int, int]:
    """The middle, and how far the ends are from it."""
    return (least + most) // 2, max(0, most - least + 1) // 2
