"""The spare hosts of a job (`--spares`), as the first host's launcher sees them: who waits, and whose place they got.

    a spare     comes under a number beyond those of the hosts, with a stream (lobby.py), and waits for a word
    the lobby   while the launchers meet after a failure, gives a spare the place of each host whose launcher is gone;
                from then on its stream is that host's

What a spare does itself: spare_host.py.
"""

from __future__ import annotations

import re
import sys

from common.errors import RendezvousError
from common.network.message_stream import MessageStream

__all__ = ["HELLO", "OVER", "TAKE", "Spares"]

HELLO = re.compile(rb"spare (\d{1,5}) of (\d{1,5})")
TAKE = b"take %d"
OVER = b"over"


class Spares:
    """
    Args:
        count: of hosts.
        most: of spares; 0: none may come.
    """

    def __init__(self, count: int, most: int) -> None:
        self._count, self.most = count, most
        self._waiting: dict[int, MessageStream] = {}  # by their numbers
        self._given: dict[int, tuple[int, MessageStream]] = {}  # hosts' places: to which spare

    def add(self, number: int, count: int, stream: MessageStream) -> None:
        """It waits from now on.

        Raises:
            RendezvousError: it cannot be one.
        """
        if count != self._count:
            raise RendezvousError(
                f"spare host {number} was started with nnodes {count}, the job with {self._count}; "
                "give all the same --nnodes"
            )
        if not self._count <= number < self._count + self.most:
            last = f"--node-rank {self._count}..{self._count + self.most - 1}" if self.most else "none"
            raise RendezvousError(
                f"the first host has --spares {self.most}, so a spare host may be {last} (got {number}); "
                "give all hosts the same --spares"
            )
        if (there := self._waiting.get(number)) and not there.gone:
            raise RendezvousError(f"spare host {number} is there already; give every host its own --node-rank")
        self._waiting[number] = stream

    def give(self, host: int) -> MessageStream | None:
        """Have a spare take the place of that host, which is gone; None: none is left."""
        number = min((number for number, stream in self._waiting.items() if not stream.gone), default=None)
        if number is None:
            return None
        stream = self._waiting.pop(number)
        self._given[host] = number, stream
        stream.send(TAKE % host)
        print(f"the launcher of host {host} is gone: spare host {number} takes its place", file=sys.stderr, flush=True)
        return stream

    def check_back(self, host: int) -> None:
        """
        Raises:
            RendezvousError: a spare has the place of that host, which comes again.
        """
        number, stream = self._given.get(host, (0, None))
        if stream and not stream.gone:
            raise RendezvousError(
                f"spare host {number} has taken the place of host {host}, which was gone; to be a spare in turn, this "
                f"one needs --node-rank {number}"
            )

    def dismiss(self) -> None:
        """The job is over."""
        for stream in self._waiting.values():
            stream.send(OVER)
            stream.end("the job is over")
