"""A trainer's sessions with all servers: saying something to all of them, and waiting for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.errors import GradSyncError, PeerStalled, UsageError
from common.network.gradsync_pb2 import Hello, TrainerMessage
from common.network.reach import told_apart
from common.network.rendezvous import GRACE
from common.system.memory import Unreachable
from ps.client.inbox import FAREWELL_S
from ps.client.joining import Joined
from ps.client.mail import Mail
from ps.client.session import Session

__all__ = ["Servers"]

SLICE_S = 0.05  # a trainer that waits for a note looks this often whether somebody died
ON_ITS_WAY_S = 0.5  # after the last message of it: then a result that was sent before a failure does not come


class Servers:
    """
    Args:
        timeout: deadline of every wait, in seconds, from the last sign of life on.

    Attributes:
        mail: of other trainers, which the first server passes on.
    """

    def __init__(self, rank: int, nranks: int, timeout: float, epoch: int) -> None:
        self.rank, self.timeout, self._epoch = rank, timeout, epoch
        self.sessions: list[Session] = []
        self._changed = threading.Condition()
        self.mail = Mail(nranks, epoch, self._changed)

    def open(self, joined: Joined) -> None:
        """Begin the session with one more server."""
        self.sessions.append(Session(joined, self._changed, self._epoch, None if self.sessions else self.mail))
        hello = Hello(epoch=self._epoch, rank=self.rank, token=joined.token, model=joined.model)
        self.sessions[-1].send([TrainerMessage(hello=hello)])

    def send_all(self, message: TrainerMessage) -> None:
        for session in self.sessions:
            session.send([message])

    @property
    def error(self) -> GradSyncError | None:
        """What some session failed with."""
        return next((session.inbox.error for session in self.sessions if session.inbox.error), None)

    def check(self) -> None:
        """
        Raises:
            GradSyncError: a session has failed.
        """
        if error := self.error:
            raise error

    def soon(self, done: Callable[[], bool], seconds: float) -> bool:
        """Whether `done` holds within so many seconds; sooner than that not, if a session has failed."""
        with self._changed:
            self._changed.wait_for(lambda: done() or self.error is not None, seconds)
            return done()

    def wait_for_step(self, version: int, doing: str) -> None:
        """Wait until what is served at the end of a step has come from all servers, also if one has failed since."""
        begun = time.monotonic()

        def has_come(session: Session) -> bool:
            return session.inbox.version >= version

        for session in self.sessions:
            while session.plane.tells_results and session.inbox.version < version:
                late = time.monotonic() > max(begun, session.inbox.heard_at) + self.timeout + GRACE
                vain = late or self.error is not None
                if message := session.plane.hear(0.0 if vain else SLICE_S):
                    session.inbox.take(message)
                elif vain:
                    break
        try:
            self.wait(has_come, doing, begun=begun)
        except GradSyncError:
            if not self._still_comes(version, has_come):
                raise

    def _still_comes(self, version: int, has_come: Callable[[Session], bool]) -> bool:
        """Whether the result of a step comes after a failure. A server that fails says which one it has sent; over TCP
        that travels apart, and may come later."""
        if max(session.inbox.last_served for session in self.sessions) < version:
            return False
        begun = time.monotonic()
        while missing := [session for session in self.sessions if not has_come(session)]:
            if any(session.inbox.error and session.inbox.last_served < version for session in missing):
                return False
            if time.monotonic() > max(begun, *(session.inbox.words_at for session in missing)) + ON_ITS_WAY_S:
                return False
            for session in missing:
                if session.plane.tells_results and (message := session.plane.hear(SLICE_S)):
                    session.inbox.take(message)
            with self._changed:
                self._changed.wait_for(lambda: all(map(has_come, self.sessions)), SLICE_S)
        return True

    def wait(self, done: Callable[[Session], bool], doing: str, *, begun: float | None = None) -> None:
        """Wait until `done` holds for every session; the server, which knows more, is the first to complain. The limit
        counts from the last sign of life, for a large model may take longer to arrive. What has come before a session
        failed counts: the next call says so."""

        def settled() -> bool:
            return self.error is not None or all(done(session) for session in self.sessions)

        begun = time.monotonic() if begun is None else begun
        with self._changed:
            while not settled():
                silent_since = max(begun, *(s.inbox.heard_at for s in self.sessions if not done(s)))
                remaining = silent_since + self.timeout + GRACE - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait_for(settled, min(remaining, self.timeout / 10))
                for session in self.sessions if remaining < self.timeout else ():
                    session.inbox.answer()  # whether it is acknowledged tells a frozen server from a cut link
            if self.sessions and all(map(done, self.sessions)):
                return
            self.check()
            for session in self.sessions:
                if not done(session):
                    stalled = PeerStalled(
                        f"{session.name} did not answer within {self.timeout:g} s while {doing}; "
                        "it is frozen or overloaded"
                    )
                    error = told_apart(stalled, session.name, session.joined.host, self.timeout)
                    session.inbox.fail(error)  # which the other servers are told as we leave
                    raise error

    @contextmanager
    def within_reach(self) -> Iterator[None]:
        """Where a server's memory cannot be reached, say why."""
        try:
            yield
        except Unreachable as exc:
            with self._changed:  # of a server that has ended meanwhile, there is no memory: it says why
                self._changed.wait_for(lambda: self.error is not None, FAREWELL_S)
                if error := self.error:
                    raise error from exc
            raise UsageError(
                f"rank {self.rank} cannot share memory with the servers: {exc}; use --data-plane grpc"
            ) from exc

    def close(self, goodbye: TrainerMessage) -> None:
        """Say goodbye to all; idempotent."""
        while self.sessions:
            self.sessions.pop().close(goodbye)
