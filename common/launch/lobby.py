"""Where the launchers of a job of several hosts are, as long as they live: with that of the first host.

meetings   all tell each other their addresses and notes, at the start and after a failure (rendezvous.py)
streams    each launcher of another host has one with the first (message_stream.py), so that either notices at once
           when the other is gone; what they tell each other between meetings goes over it

host 0     Lobby    listens at the port after the job's own, opens meetings, knows who is there
host 1...  Visit    meets there; where the first launcher was lost, with the one that has taken its place
spares     are in touch with the lobby too, and meet once they have the place of a host that is gone (spares.py)
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import grpc

from common import __version__
from common.errors import GradSyncError, PeerLost, PeerUnreachable, RendezvousError
from common.launch.spares import HELLO, Spares
from common.network import rpc
from common.network.callers import MOST_CALLERS, Callers
from common.network.gradsync_pb2 import JoinReply, JoinRequest
from common.network.message_stream import MessageStream
from common.network.rendezvous import GRACE, METHOD, Membership, Roster, join, read_join

__all__ = ["Company", "Lobby", "Visit", "company_of", "until_met"]

T = TypeVar("T")

SERVICE = "gradsync.Lobby"
STAY = f"/{SERVICE}/Stay"
MOST_WAIT_S = 1e6
MOST_DIGITS = 5
LOOK_S = 0.1  # between two looks who is gone, in a meeting
AGAIN_S = 0.1  # after the first launcher was lost
MEETINGS, _, JOIN = METHOD[1:].partition("/")


class Company(ABC):
    """The launchers of a job's hosts, as one of them sees it; a context manager."""

    @abstractmethod
    def meet(self, address: str, note: bytes, timeout: float) -> Membership:
        """Tell all others this, and learn what they tell; blocks until all have come, at most `timeout` seconds.

        Raises:
            RendezvousError, VersionMismatch, PeerUnreachable: they did not come, or contradict each other.
        """

    @abstractmethod
    def stream(self, host: int) -> MessageStream:
        """That with this host's launcher, after a meeting; on other hosts than the first there is one with that."""

    @abstractmethod
    def close(self) -> None:
        """Leave it; who waits for this launcher learns so."""

    def __enter__(self) -> Company:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def company_of(address: str, index: int, count: int, *, silence: float, spares: int = 0) -> Company:
    """That of host `index` of `count`, whose launchers meet at HOST:PORT.

    Args:
        silence: seconds without a sign of life after which a launcher counts as gone.
        spares: how many hosts may wait to take the place of one.

    Raises:
        PortInUse: on the first host.
    """
    if index:
        return Visit(address, index, count, silence=silence)
    return Lobby(address, count, silence=silence, spares=spares)


class Lobby(Company):
    """The first host's.

    Args:
        silence, spares: see `company_of`.

    Raises:
        PortInUse: at construction.
    """

    def __init__(self, address: str, count: int, *, silence: float, spares: int = 0) -> None:
        self._count, self._silence, self._spares = count, silence, Spares(count, spares)
        self._meeting: Roster | None = None  # None: none is open
        self._streams: dict[int, MessageStream] = {}  # by host, of those who met last
        self._newcomers: dict[int, MessageStream] = {}  # since then
        self._changed = threading.Condition()
        self._door = Callers()
        handlers: dict[str, Any] = {JOIN: grpc.stream_unary_rpc_method_handler(self._join, None, encoded)}
        stay: Any = {STAY.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(self._stay)}

        def add(server: grpc.Server) -> None:
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, stay),))

        threads = 2 * (count + spares) + MOST_CALLERS + 2
        self._server, self.address = rpc.serve(address, MEETINGS, handlers, threads=threads, more=add)

    def stream(self, host: int) -> MessageStream:
        return self._streams[host]

    def meet(self, address: str, note: bytes, timeout: float) -> Membership:
        request = JoinRequest(version=__version__, rank=0, nranks=self._count, address=address, note=note)
        meeting = Roster(self._count, member="host")
        with self._changed:
            self._meeting = meeting
            self._changed.notify_all()
        with self._filling(meeting):
            members = meeting.wait_for_all(request, timeout)
        with self._changed:
            self._meeting = None  # who comes from now on waits for the next one
            self._streams |= {h: new for h, new in self._newcomers.items() if h not in self._streams or not new.gone}
            self._newcomers = {}
            for stream in self._streams.values():
                stream.renew()
        return Membership(tuple(m.address for m in members), b"", tuple(m.note for m in members))

    @contextmanager
    def _filling(self, meeting: Roster) -> Iterator[None]:
        """Within, spares are given the places of those who were at a meeting and are gone."""
        over = threading.Event()

        def fill() -> None:
            while not over.wait(LOOK_S):
                with self._changed:
                    for host, stream in self._streams.items():
                        there = self._newcomers.get(host, stream)
                        if there.gone and host not in meeting.members and (spare := self._spares.give(host)):
                            self._newcomers[host] = spare
                            there.end(f"a spare host has the place of host {host}")  # should it only have been silent

        thread = threading.Thread(target=fill, name="gradsync-spares", daemon=True)
        if self._spares.most:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if self._spares.most:
                thread.join()

    def _join(self, received: Iterator[bytes], context: grpc.ServicerContext) -> JoinReply:
        data = self._door.first_of(received, context)
        try:
            request = read_join(data)
            meeting = self._wait_for_meeting(context)
            members = meeting.wait_for_all(request, MOST_WAIT_S, call=context)
        except GradSyncError as exc:
            rpc.abort_with(context, exc)
        return JoinReply(addresses=[m.address for m in members], notes=[m.note for m in members])

    def _wait_for_meeting(self, context: grpc.ServicerContext) -> Roster:
        """Until one is open, as long as the caller waits.

        Raises:
            PeerUnreachable: none was.
        """
        seconds = min(MOST_WAIT_S, context.time_remaining() or 0.0) - GRACE / 2
        deadline = time.monotonic() + seconds
        with self._changed:
            here = context.add_callback(self._look_again)
            while self._meeting is None and here and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
                here = context.is_active()
            if self._meeting is None:
                raise PeerUnreachable(
                    f"the launchers of this job did not meet within {seconds:.3g} s: that of host 0, at "
                    f"{self.address}, goes on without this one; is --node-rank right?"
                )
            return self._meeting

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _stay(self, received: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        data = self._door.first_of(received, context)
        spare = HELLO.fullmatch(data)
        if not spare and (not data.isdigit() or len(data) > MOST_DIGITS):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no host's number: {data[:20]!r}")
        host = int(spare[1] if spare else data)
        stream = MessageStream(f"the launcher of host {host}", self._silence)
        try:
            with self._changed:
                if spare:
                    self._spares.add(host, int(spare[2]), stream)
                else:
                    self._spares.check_back(host)
                    self._newcomers[host] = stream
        except GradSyncError as exc:
            rpc.abort_with(context, exc)
        if not context.add_callback(lambda: stream.end(f"{stream.peer} is gone")):
            return
        threading.Thread(target=stream.read, args=(received,), name="gradsync-lobby", daemon=True).start()
        yield b""  # it is there
        yield from stream.outgoing()

    def close(self) -> None:
        if self._meeting is not None:
            self._meeting.let_latecomers_hear()
            if not self._meeting.complete:
                self._meeting.fail(RendezvousError("host 0 left before the group was complete"))
        for stream in [*self._streams.values(), *self._newcomers.values()]:
            stream.end("this launcher ends")
        self._spares.dismiss()
        rpc.stop(self._server, grace=1.0)


def encoded(reply: JoinReply) -> bytes:
    return reply.SerializeToString()


class Visit(Company):
    """Another host's."""

    def __init__(self, address: str, index: int, count: int, *, silence: float) -> None:
        self._address, self._index, self._count, self._silence = address, index, count, silence
        self._channels = ExitStack()  # with one at most
        self._stream: MessageStream | None = None  # None: the first host's launcher was not met yet

    def meet(self, address: str, note: bytes, timeout: float) -> Membership:
        deadline = time.monotonic() + timeout

        def join_others() -> Membership:
            self._come_in(deadline - time.monotonic())
            return join(
                self._address,
                rank=self._index,
                nranks=self._count,
                backend="",
                address=address,
                timeout=max(0.0, deadline - time.monotonic()),
                member="host",
                note=note,
            )

        return until_met(join_others, deadline)

    def stream(self, host: int) -> MessageStream:
        assert host == 0
        assert self._stream
        return self._stream

    def _come_in(self, timeout: float) -> MessageStream:
        """Have a stream with the launcher that is the first one by now.

        Raises:
            PeerUnreachable: there is none.
            PeerLost: it is gone again.
        """
        if self._stream is not None and self._is_usable(self._stream):
            return self._stream
        self.close()
        channel = self._channels.enter_context(rpc.connect(self._address, timeout=timeout))
        stream = MessageStream("the launcher of host 0", self._silence)
        stay: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(STAY)
        call = stay(with_hello(self._hello(), stream))
        try:
            next(call)
        except grpc.RpcError as exc:
            stream.end("it was not let in")
            raise rpc.translate(exc, f"host 0 at {self._address}", "joining the launchers") from exc
        threading.Thread(target=stream.read, args=(call,), name="gradsync-lobby", daemon=True).start()
        self._stream = stream
        return stream

    def _is_usable(self, stream: MessageStream) -> bool:
        """Else there is to be another one, over a connection of its own."""
        return not stream.has_lapsed

    def _hello(self) -> bytes:
        return str(self._index).encode()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.end("this launcher ends")
        self._channels.close()
        self._stream = None


def until_met(attempt: Callable[[], T], deadline: float) -> T:
    """What `attempt` returns; once more where the first launcher is lost meanwhile, for another may take its place.

    Args:
        deadline: no further attempt is begun after it, monotonic seconds.

    Raises:
        PeerLost: the first launcher is gone again.
    """
    while True:
        try:
            return attempt()
        except PeerLost:
            if time.monotonic() + AGAIN_S > deadline:
                raise
            time.sleep(AGAIN_S)


def with_hello(hello: bytes, stream: MessageStream) -> Iterator[bytes]:
    yield hello
    yield from stream.outgoing()
