"""What a process of a training did when, for `--trace FILE`: recorded here, on its own clock.

A rank's recording begins before it attaches and knows the step it is in. A server's begins when a trainer that records
registers. At the end (common/launch/tracing.py; the file is common/launch/trace_file.py's)

    under a launcher of one host   every process leaves its part in a folder, failed or not, and the launcher merges;
                                   all read one CLOCK_MONOTONIC
    otherwise                      the ranks gather their parts, rank 0 asks the servers for theirs, and writes; after
                                   a failure rank 0 writes its own alone. Where hosts differ, so do clocks (clocks.py)
"""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from common.system.addresses import clock_identity

__all__ = [
    "FINISH",
    "MOST_EVENTS",
    "NO_SERVERS",
    "NO_TRACE",
    "Part",
    "Reading",
    "Recorder",
    "ServerAnswer",
    "Trace",
    "TracedServers",
]

FINISH = "finish"  # the span from when a rank's backward is done to when its step is

MOST_EVENTS = 1 << 16  # of a process, about 10 MB; of a longer training the last ones are kept
M = TypeVar("M")
Part = dict[str, Any]  # what Recorder.part gives
Reading = tuple[int, int, int]  # of a clock, ns: when, how much more than rank 0's it showed, give or take how much


class Trace:
    """Records nothing: what everybody has unless a trace is asked for."""

    active = False

    def span(self, name: str, bucket: int = -1, *, step: int = -1) -> AbstractContextManager[object]:
        """What happens within, of a bucket or of a step as a whole; by default of the step under way."""
        return NOTHING

    def moment(self, name: str, bucket: int = -1, *, step: int = -1) -> None:
        """Something has happened now, by default in the step under way."""

    def add(self, name: str, begin: float, end: float) -> None:
        """A span of the step under way that has ended; monotonic seconds."""

    def sending(self, messages: Iterable[M], bucket: int) -> Iterable[M]:
        """The same messages, with a moment "sent" as the first of them is drawn."""
        return messages

    def name_buckets(self, sizes: Sequence[int]) -> None:
        """Take note of the bytes of each bucket."""

    def packed(self) -> bytes:
        """The part, to be sent."""
        return b""

    def leave(self, folder: Path | None) -> None:
        """Write the part into a launcher's folder, if there is one."""


NOTHING: AbstractContextManager[object] = nullcontext()
NO_TRACE = Trace()


class Recorder(Trace):
    """The part of one process. Thread-safe: an event is one append.

    Args:
        kind: "rank" or "server".
        of: what the file tells of the training: scheme, nranks, servers, staleness, restarts.
        clock: monotonic, ns.
    """

    active = True

    def __init__(self, kind: str, index: int, *, clock: Callable[[], int] = time.monotonic_ns, **of: Any) -> None:
        self.kind, self.index, self.of, self.clock = kind, index, of, clock
        self.host = clock_identity()
        self.step = 0
        self.buckets: list[int] = []  # bytes of each
        self.readings: list[Reading] = []
        self.of_servers: list[list[Reading]] = []  # rank 0: of each server's clock
        self.events: deque[tuple[int, int, str, int, int]] = deque(maxlen=MOST_EVENTS)  # begin, end, name, step, bucket

    def span(self, name: str, bucket: int = -1, *, step: int = -1) -> Span:
        return Span(self, name, self.step if step < 0 else step, bucket)

    def moment(self, name: str, bucket: int = -1, *, step: int = -1) -> None:
        now = self.clock()
        self.events.append((now, now, name, self.step if step < 0 else step, bucket))

    def add(self, name: str, begin: float, end: float) -> None:
        self.events.append((int(begin * 1e9), int(end * 1e9), name, self.step, -1))

    def sending(self, messages: Iterable[M], bucket: int) -> Iterator[M]:
        def noted(step: int) -> Iterator[M]:
            self.moment("sent", bucket, step=step)
            yield from messages

        return noted(self.step)  # which may have ended before they are drawn

    def name_buckets(self, sizes: Sequence[int]) -> None:
        self.buckets = list(sizes)

    def part(self) -> Part:
        """What JSON can hold of it."""
        events = list(self.events)
        full = len(events) == self.events.maxlen
        first_step = min((e[3] for e in events), default=0) + 1 if full else 0  # the one before is not whole
        return {
            "kind": self.kind,
            "index": self.index,
            "of": self.of,
            "host": self.host,
            "readings": self.readings,
            "buckets": self.buckets,
            "first_step": first_step,
            "events": events,
        }

    def packed(self) -> bytes:
        return zlib.compress(json.dumps(self.part()).encode(), 1)

    def leave(self, folder: Path | None) -> None:
        if folder is not None:
            unfinished = folder / f"{self.kind}-{self.index}.unfinished"
            unfinished.write_bytes(self.packed())
            unfinished.rename(unfinished.with_suffix(".part"))


class Span:
    """Recorded as it ends, however it does. A span FINISH ends the rank's step."""

    __slots__ = ("_begin", "_bucket", "_name", "_recorder", "_step")

    def __init__(self, recorder: Recorder, name: str, step: int, bucket: int) -> None:
        self._recorder, self._name, self._step, self._bucket = recorder, name, step, bucket

    def __enter__(self) -> None:
        self._begin = self._recorder.clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        recorder = self._recorder
        recorder.events.append((self._begin, recorder.clock(), self._name, self._step, self._bucket))
        if self._name == FINISH:
            recorder.step += 1


@dataclass(frozen=True)
class ServerAnswer:
    """What a server has told of its clock and perhaps of its events, and the caller's clock around that; ns."""

    before: int
    theirs: int
    after: int
    host: str
    packed: bytes = b""


class TracedServers(Protocol):
    """The servers of a training, which record as its ranks do."""

    def ask_servers(self, *, events: bool = False) -> list[ServerAnswer]:
        """Every server's clock and, if wanted, what it has recorded; not within a step."""


class NoServers:
    """A scheme without servers."""

    def ask_servers(self, *, events: bool = False) -> list[ServerAnswer]:
        return []


NO_SERVERS: TracedServers = NoServers()
