"""Who is alive, why a rank left, and who is stuck: told over sockets between ranks, in a large group by some to others.

A group's data does not pass here, only what its messenger carries (messenger.py). A socket that closes without a
`leave` (messages.py) is a process that died: everyone who waits learns it at once, and which. Who waits for long asks
all others for a sign of life, which a thread of theirs gives whatever their training does; how long it then waits says
common/network/patience.py.

In a large group a rank has such sockets with its neighbours only (overlay.py). Who learns there why the group cannot
go on tells its neighbours, so that all know it at once; signs of life go round while somebody waits (signs.py); and who
has a message for another rank opens a socket for it (direct_links.py).
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from collective.membership.direct_links import DirectLinks
from collective.membership.ends import Ends
from collective.membership.messages import Peer, frame
from collective.membership.overlay import FEW
from collective.membership.signs import Signs, Told
from common.errors import GradSyncError, PeerLost, PeerStalled, PeerUnreachable, ProtocolError
from common.network.patience import ALIKE, STUCK, WAIT_LIMIT_S, Patience
from common.network.reach import told_apart
from common.network.sockets import poll_readable
from common.system.memory import Unreachable
from common.system.process import forget_in_children

__all__ = ["Mesh"]

WAITS_S = 0.5  # a rank that looked for others so recently waits
ABSENT_S = 1.0  # one that has not looked for so long, though it waits, was stopped itself
PAUSE_S = 0.05  # between two answers: notes that come with every call must not wake the thread for each
PERIOD_S = 1.0  # between signs that go round, at most; less if the timeout is short
PERIODS = 20  # of a timeout
EXPLAIN_S = 1.0  # a rank that does not answer may be dead, of which word comes a moment later


class Mesh(Ends):
    """The sockets of one rank. `check` and the waits raise PeerLost, PeerStalled or PeerUnreachable, naming the rank.

    Thread-safe; a thread of its own answers the other ranks.

    Args:
        connections, nranks, near, direct: see Ends; they are closed with the mesh.
        timeout, wait_limit: see Patience.
    """

    def __init__(
        self,
        rank: int,
        connections: dict[int, socket.socket],
        *,
        nranks: int = 0,
        near: Sequence[int] = (),
        direct: DirectLinks | None = None,
        timeout: float,
        wait_limit: float = WAIT_LIMIT_S,
    ) -> None:
        super().__init__(rank, connections, nranks, near, direct)
        self.patience = Patience(timeout, wait_limit)
        self._signs = Signs(rank, self.nranks, min(PERIOD_S, timeout / PERIODS))
        self.step: Callable[[], int | None] = lambda: None  # the one that is under way, for who asks
        self._failure: GradSyncError | None = None
        self._alarm: Callable[[], object] | None = None
        self._culprit = -1
        self._closed = threading.Event()
        self._wait = (0.0, 0.0)  # the last wait: since when, and when this rank last looked (monotonic seconds)
        self._awake_since = 0.0  # no rank can be called silent for longer
        self._attended = False  # somebody reads and answers without the thread
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if direct:
            direct.door.tell = self._ring
        self._thread = threading.Thread(target=self._answer, name="gradsync-alive", daemon=True)
        if self.peers:
            self._thread.start()
        forget_in_children(self)

    @property
    def timeout(self) -> float:
        """How long a rank may give no sign of life, seconds."""
        return self.patience.timeout

    def has_left(self, rank: int) -> bool:
        """Whether `rank` has said that its training is complete."""
        return rank in self._signs.left or super().has_left(rank)

    def check(self, needed: int | None = None, doing: str = "") -> None:
        """Read what has arrived and raise if the group cannot go on.

        Args:
            needed: a rank without which the caller cannot go on; also its orderly leaving is then an error.
        """
        with self._lock:
            self._hear()
            self._judge_what_was_heard(needed, doing)

    def _judge_what_was_heard(self, needed: int | None, doing: str) -> None:
        if self._failure:
            raise self._failure
        if needed is not None and self.has_left(needed):
            raise self._fail(PeerLost(f"rank {needed} finished while rank {self.rank} was {doing}; {ALIKE}"), needed)

    def wait_on(self, suspect: int | None, doing: str, since: float) -> bool:
        """To be called again and again by a rank that waits since then (monotonic seconds), for that rank as far as it
        sees: raises when that is enough, and says meanwhile whom the ranks wait for.

        A rank that waits for another one is not to blame, so every rank is asked for how long it has waited, too.

        Returns:
            whether all have waited for too long; only without a suspect, else it is to blame.
        """
        now, looked = time.monotonic(), max(since, self._wait[1])
        waited, self._wait = now - since, (since, now)
        if now - looked > ABSENT_S:
            self._awake_since = now
        if self.patience.asks(now, waited):
            with self._lock:
                for peer in self._present():
                    peer.send({"waiting?": 1}, timeout=self.timeout)
                if not self._all_are_neighbours and self._signs.wake(now):
                    self._ring()
        if waited <= self.timeout:
            return False
        with self._lock:
            self._hear()
            if self._failure:
                raise self._failure
            return self._judge(suspect, doing, since, now)

    def stop_waiting(self) -> None:
        """What it waited for has come: else it would be taken for a waiting one for another WAITS_S."""
        self._wait = (0.0, 0.0)

    def _judge(self, suspect: int | None, doing: str, since: float, now: float) -> bool:
        """Of a wait that has outlasted the timeout."""
        present, waited = self._known(), now - since
        silent = {r: now - max(heard_at, since, self._awake_since) for r, (heard_at, _) in present.items()}
        late = [r for r in silent if silent[r] > self._most_silence(r)]
        late = late or [r for r, (_, their_wait) in present.items() if not their_wait]
        if not late:  # they wait for one another
            if any(their_wait <= self.timeout for _, their_wait in present.values()):
                return False
            if suspect is None:
                return True
            raise self._fail(
                PeerStalled(
                    f"rank {suspect} did not take part for {self.timeout:g} s (rank {self.rank} was {doing}); {STUCK}, "
                    "or the network between them is cut"
                ),
                suspect,
            )
        culprit = suspect if suspect in late else late[0]
        asker = f"rank {self.rank} was {doing}"
        if error := self.patience.ends({culprit: silent[culprit]}, waited, asker=asker):
            host = self.peers[culprit].host if culprit in self.peers else ""
            raise self._fail(told_apart(error, f"rank {culprit}", host, self.timeout), culprit)
        waiting = sorted([self.rank, *(r for r, (_, their_wait) in present.items() if their_wait)])
        if self.rank == waiting[0]:
            self._say(self.patience.remark(waiting, late, self.step(), waited))
        return False

    def _most_silence(self, rank: int) -> float:
        """A neighbour knows better, and says so."""
        return self.timeout + (0.0 if rank in self.peers else 2 * self._signs.period)

    def _known(self) -> dict[int, tuple[float, float]]:
        """Of each other rank that has not left: when it was heard of last, and for how long it had waited then."""
        known = {p.rank: (p.heard_at, p.waited) for p in self._present()}
        if self._all_are_neighbours:
            return known
        here = {r: self._signs.of(r) for r in range(self.nranks) if r != self.rank and not self.has_left(r)}
        return {r: max(known.get(r, each), each) for r, each in here.items()}

    def _say(self, line: str) -> None:
        """On the stderr of the lowest rank, which the launcher shows; neighbour by neighbour."""
        if not line:
            return
        lowest = next((p for p in self._present() if p.rank < self.rank), None)
        if lowest:
            lowest.send({"say": line}, timeout=self.timeout)
        else:
            print(line, file=sys.stderr, flush=True)

    def _waited(self) -> float:
        """For how many seconds this rank has waited by now; 0: it does not."""
        since, looked = self._wait
        return looked - since if time.monotonic() - looked < WAITS_S else 0.0

    def _ring(self) -> None:
        """Let the thread look."""
        os.eventfd_write(self._wake, 1)

    def _answer(self) -> None:
        """On a thread of its own, until the mesh is closed: a sign of life to whoever asks."""
        while not self._closed.is_set():
            due = self._signs.due(time.monotonic())
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            for each in [*self._ends]:
                if not each.left:
                    unsent = each.unsent and not self._attended
                    poll.register(each.connection, select.POLLIN | (select.POLLOUT if unsent else 0))
            poll.poll(None if due == math.inf else due * 1000)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            with self._lock:
                if self._closed.is_set():
                    return
                if not self._attended:
                    self._hear()
                    for each in self._ends:
                        each.push()
                if not self._signs.due(time.monotonic()):
                    self._pass_on_signs()
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            poll.poll(PAUSE_S * 1000)

    def _pass_on_signs(self) -> None:
        self._signs.left.update(peer.rank for peer in self.peers.values() if peer.left)
        signs = frame(self._signs.tell(self._waited(), time.monotonic()))
        for peer in self._present():
            if not peer.unsent:  # else it takes nothing in, and would get ever more
                peer.post(signs)

    def tell(self, rank: int, note: list[int]) -> None:
        """Send numbers to `rank`, for its `told`."""
        with self._lock:
            self.peers[rank].send({"note": note}, timeout=self.timeout)

    def told(self, rank: int) -> list[int] | None:
        """The next numbers that `rank` sent; None if there are none yet. Never blocks; raises like `check`."""
        peer = self.peers[rank]
        with self._lock:
            if not peer.notes and not peer.left:
                self._read(peer)
            if self._failure:
                raise self._failure
            return peer.notes.popleft() if peer.notes else None

    def take_segment(self, rank: int, number: int, doing: str) -> tuple[int, int]:
        """(descriptor, bytes) of the segment that `rank` offered under this number; waits for it."""
        since = time.monotonic()
        while (found := self._segment_of(rank, number)) is None:
            self.check(rank, doing)
            if (found := self._segment_of(rank, number)) is not None:
                break
            self.wait_on(rank, doing, since)
            poll_readable(self.sockets, 0.05)
        self.stop_waiting()
        return found

    @contextmanager
    def attended(self) -> Iterator[None]:
        """While the caller reads again and again, so that the thread, which would only be in its way, need not.

        Raises:
            RuntimeError: the mesh is closed.
        """
        self._check_open()
        with self._lock:
            self._attended = True
        try:
            yield
        finally:
            self._attended = False

    @contextmanager
    def alarming(self, alarm: Callable[[], object]) -> Iterator[None]:
        """For who sleeps without looking at sockets: the thread calls `alarm` when the group cannot go on any more."""
        with self._lock:
            self._alarm = alarm
        try:
            yield
        finally:
            with self._lock:  # it is not under way then
                self._alarm = None

    def _check_open(self) -> None:
        if self._closed.is_set():  # also in a forked child, where another thread may hold the lock for ever
            raise RuntimeError("the group is closed")

    def put_piece(self, rank: int, channel: int, piece: memoryview, *, last: bool) -> None:
        """A piece of a message to `rank`, for it to `take`; to be pushed."""
        end = self.way_to(rank)
        with self._lock:
            end.put_piece(channel, piece, last=last)

    def push(self, rank: int) -> tuple[bool, bool]:
        """(whether anything of what waits to be sent to `rank` went off; whether all has). Never blocks, and raises as
        `check` if it is gone."""
        peer = self.way_to(rank)
        with self._lock:
            moved = peer.push()
            if peer.left or not moved:
                self.check(rank, "sending")
            return moved, not (peer.unsent or peer.gone)

    def take(self, rank: int, channel: int, doing: str, *, leave: bool = False) -> bytearray | None:
        """The next message of `rank` on this channel, left there or not; None if there is none: raises as `check`."""
        with self._lock:
            self._hear()
            end = self.way_from(rank)
            if end and (queue := end.messages.get(channel)):
                return queue[0] if leave else queue.popleft()
            self._judge_what_was_heard(rank, doing)  # hearing more now could bring it, and the goodbye behind it
        return None

    def way_to(self, rank: int) -> Peer:
        """By which messages go to `rank`; to one that is no neighbour it is opened first.

        Raises:
            PeerLost, PeerStalled, PeerUnreachable: that rank cannot be reached.
        """
        known = self.peers.get(rank) or self._to.get(rank)
        if known or not self._direct:
            return known or self.peers[rank]
        self._check_open()
        self.check(rank, "opening a connection")
        try:
            connection = self._direct.open(rank, self.timeout)
        except (PeerUnreachable, Unreachable) as exc:
            deadline = time.monotonic() + EXPLAIN_S
            while time.monotonic() < deadline:
                self.check(rank, "opening a connection")
                poll_readable(self.sockets, 0.05)
            with self._lock:
                raise self._fail(PeerUnreachable(f"rank {rank} {exc}"), rank) from exc
        with self._lock:
            self._to[rank] = self._new_end(rank, connection)
        return self._to[rank]

    def forget(self) -> None:
        """See Ends."""
        self._closed.set()
        super().forget()

    def close(self, reason: str = "") -> None:
        """Tell everyone that this rank leaves, and why if it failed, then close; never raises."""
        if self._closed.is_set():  # also in a forked child, where another thread may hold the lock for ever
            return
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            os.eventfd_write(self._wake, 1)
            message: dict[str, Any] = {"leave": reason}
            if self._failure:
                message["because"] = [type(self._failure).__name__, str(self._failure), self._culprit]
            for end in self._ends:
                end.send(message, timeout=self.timeout)
        if self.peers:
            self._thread.join()
        if self._direct:
            self._direct.close()
        for end in self._ends:
            end.close()
        os.close(self._wake)

    def _heard(self, end: Peer) -> None:
        if end.failure:
            self._fail(*end.failure)
        while end.lines:
            self._say(end.lines.popleft())
        if end.signs:
            self._take_signs(end, end.signs)

    def _take_signs(self, end: Peer, told: Told) -> None:
        end.signs = None
        try:
            if self._signs.hear(told, time.monotonic()):
                self._ring()
        except ProtocolError as exc:
            self._fail(ProtocolError(f"rank {end.rank}: {exc}"), end.rank)
            return
        end.waited = told.waited[end.rank]

    def _fail(self, error: GradSyncError, culprit: int) -> GradSyncError:
        """Keep the first failure, and return it: later ones follow from it."""
        if self._failure is None:
            self._failure, self._culprit = error, culprit
            if self._alarm:
                self._alarm()
            if self.nranks > FEW:
                lost = frame({"lost": [type(error).__name__, str(error), culprit]})
                for peer in self._present():
                    peer.post(lost)
        return self._failure
