"""A spare host's launcher (`--spares`): it waits with that of the first host until it may take the place of another."""

from __future__ import annotations

import sys
import time

from common.launch.lobby import Visit, until_met
from common.launch.spares import OVER, TAKE
from common.network.message_stream import MessageStream

__all__ = ["SpareHost"]

LOOK_S = 0.1  # between two looks at what the first host says


class SpareHost(Visit):
    """What is told of it is on stderr.

    Args:
        patience: seconds to wait for the first host, at the start, or when it is lost.
    """

    def __init__(self, address: str, number: int, count: int, *, silence: float, patience: float) -> None:
        super().__init__(address, number, count, silence=silence)
        self._number, self._patience = number, patience

    def __enter__(self) -> SpareHost:
        return self

    def wait_for_place(self) -> int:
        """Which host this one is from now on. There is no limit but for the first host.

        Raises:
            GradSyncError: that does not answer, or refuses this one.
            SystemExit: with 0: the job is over, well or not.
        """
        say(
            f"this is spare host {self._number}: it waits until one of the {self._count} hosts is lost, other than the "
            "first, and takes its place (--spares)"
        )
        words: list[bytes] = []
        while not words:
            stream = self._with_first_host()
            gone = False
            while not (words or gone):
                time.sleep(LOOK_S)
                gone, words = bool(stream.gone), stream.take()
        if words[0] == OVER:
            say(f"the job is over: spare host {self._number} was not needed")
            raise SystemExit(0)
        self._index = next(host for host in range(self._count) if words[0] == TAKE % host)
        say(f"this host takes the place of host {self._index}, which is gone")
        return self._index

    def _with_first_host(self) -> MessageStream:
        """Also where the first host is lost while this one comes."""
        deadline = time.monotonic() + self._patience
        return until_met(lambda: self._come_in(deadline - time.monotonic()), deadline)

    def _is_usable(self, stream: MessageStream) -> bool:
        """The first host knows by its stream whose place it has."""
        return not stream.gone

    def _hello(self) -> bytes:
        waits = self._index >= self._count
        return b"spare %d of %d" % (self._number, self._count) if waits else super()._hello()


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
