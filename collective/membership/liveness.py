"""Who is alive, why a rank left, and who is stuck: told by one socket from every rank to every other.

A group's data does not pass here, only what its messenger carries (messenger.py). A socket that closes without a
`leave` (messages.py) is a process that died: everyone who waits learns it at once, and which. Who waits for long asks
all others for a sign of life, which a thread of theirs gives whatever their training does; how long it then waits says
common/network/patience.py.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from collective.membership.messages import Peer
from common.errors import GradSyncError, PeerLost, PeerStalled
from common.network.patience import WAIT_LIMIT_S, Patience
from common.network.reach import told_apart
from common.network.sockets import poll_readable
from common.system.process import forget_in_children

__all__ = ["Mesh"]

WAITS_S = 0.5  # a rank that looked for others so recently waits
ABSENT_S = 1.0  # one that has not looked for so long, though it waits, was stopped itself
PAUSE_S = 0.05  # between two answers: notes that come with every call must not wake the thread for each
MOST_READS = 64  # of one rank's large message at a time


class Mesh:
    """The sockets of one rank. `check` and the waits raise PeerLost, PeerStalled or PeerUnreachable, naming the rank.

    Thread-safe; a thread of its own answers the other ranks.

    Args:
        timeout, wait_limit: see Patience.
    """

    def __init__(
        self,
        rank: int,
        connections: dict[int, socket.socket],
        *,
        timeout: float,
        wait_limit: float = WAIT_LIMIT_S,
    ) -> None:
        self.rank, self.nranks = rank, len(connections) + 1
        self.patience = Patience(timeout, wait_limit)
        self.peers = {r: Peer(r, c, self._waited) for r, c in sorted(connections.items())}
        self.step: Callable[[], int | None] = lambda: None  # the one that is under way, for who asks
        self._failure: GradSyncError | None = None
        self._culprit = -1
        self._closed = threading.Event()
        self._lock = threading.RLock()  # over all but the mere waiting
        self._wait = (0.0, 0.0)  # the last wait: since when, and when this rank last looked (monotonic seconds)
        self._awake_since = 0.0  # no rank can be called silent for longer
        self._attended = False  # somebody reads and answers without the thread
        self._wake = os.eventfd(0)
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
        return self.peers[rank].left

    @property
    def sockets(self) -> list[socket.socket]:
        """To be polled beside a data socket; readable means `check`."""
        return [p.connection for p in self.peers.values() if not p.left]

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
        if needed is not None and self.peers[needed].left:
            raise self._fail(PeerLost(f"rank {needed} finished while rank {self.rank} was still {doing}"), needed)

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
        if waited <= self.timeout:
            return False
        with self._lock:
            self._hear()
            if self._failure:
                raise self._failure
            return self._judge(suspect, doing, since, now)

    def _judge(self, suspect: int | None, doing: str, since: float, now: float) -> bool:
        """Of a wait that has outlasted the timeout."""
        present, waited = self._present(), now - since
        silent = {p.rank: now - max(p.heard_at, since, self._awake_since) for p in present}
        late = [r for r in silent if silent[r] > self.timeout]
        late = late or [p.rank for p in present if not p.waited]
        if not late:  # they wait for one another
            if any(p.waited <= self.timeout for p in present):
                return False
            if suspect is None:
                return True
            raise self._fail(
                PeerStalled(
                    f"rank {suspect} did not take part for {self.timeout:g} s (rank {self.rank} was {doing}); every "
                    "rank waits for another one: their calls differ, or the network between them is cut"
                ),
                suspect,
            )
        culprit = suspect if suspect in late else late[0]
        asker = f"rank {self.rank} was {doing}"
        if error := self.patience.ends({culprit: silent[culprit]}, waited, asker=asker):
            raise self._fail(told_apart(error, f"rank {culprit}", self.peers[culprit].host, self.timeout), culprit)
        waiting = sorted([self.rank, *(p.rank for p in present if p.waited)])
        if self.rank == waiting[0]:
            self._say(self.patience.remark(waiting, late, self.step(), waited))
        return False

    def _say(self, line: str) -> None:
        """On the stderr of the lowest rank, which the launcher shows."""
        if not line:
            return
        lowest = next((p for p in self._present() if p.rank < self.rank), None)
        if lowest:
            lowest.send({"say": line}, timeout=self.timeout)
        else:
            print(line, file=sys.stderr, flush=True)

    def _present(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if not peer.left]

    def _waited(self) -> float:
        """For how many seconds this rank has waited by now; 0: it does not."""
        since, looked = self._wait
        return looked - since if time.monotonic() - looked < WAITS_S else 0.0

    def _hear(self) -> None:
        readable = poll_readable(self.sockets, 0)
        for peer in self.peers.values():
            if peer.connection in readable:
                self._read(peer)

    def _answer(self) -> None:
        """On a thread of its own, until the mesh is closed: a sign of life to whoever asks."""
        while not self._closed.is_set():
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            for each in self.sockets:
                poll.register(each, select.POLLIN)
            poll.poll()
            with self._lock:
                if self._closed.is_set():
                    return
                if not self._attended:
                    self._hear()
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            poll.poll(PAUSE_S * 1000)

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

    def offer(self, rank: int, number: int, nbytes: int, descriptor: int) -> None:
        """Let `rank` map a segment of this rank's memory (Unix sockets only)."""
        message = {"segment": number, "nbytes": nbytes}
        with self._lock:
            self.peers[rank].send(message, timeout=self.timeout, descriptors=[descriptor])

    def take_segment(self, rank: int, number: int, doing: str) -> tuple[int, int]:
        """(descriptor, bytes) of the segment that `rank` offered under this number; waits for it."""
        peer = self.peers[rank]
        since = time.monotonic()
        while number not in peer.segments:
            self.check(rank, doing)
            if number in peer.segments:
                break
            self.wait_on(rank, doing, since)
            poll_readable(self.sockets, 0.05)
        return peer.segments.pop(number)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """While the caller reads again and again, so that the thread, which would only be in its way, need not.

        Raises:
            RuntimeError: the mesh is closed.
        """
        if self._closed.is_set():  # also in a forked child, where another thread may hold the lock for ever
            raise RuntimeError("the group is closed")
        with self._lock:
            self._attended = True
        try:
            yield
        finally:
            self._attended = False

    def put_piece(self, rank: int, channel: int, piece: memoryview, *, last: bool) -> None:
        """A piece of a message to `rank`, for it to `take`; to be pushed."""
        with self._lock:
            self.peers[rank].put_piece(channel, piece, last=last)

    def push(self, rank: int) -> tuple[bool, bool]:
        """(whether anything of what waits to be sent to `rank` went off; whether all has). Never blocks, and raises as
        `check` if it is gone."""
        peer = self.peers[rank]
        with self._lock:
            moved = peer.push()
            if peer.left or not moved:
                self.check(rank, "sending")
            return moved, not (peer.unsent or peer.gone)

    def take(self, rank: int, channel: int, doing: str) -> bytearray | None:
        """The next message of `rank` on this channel, None if there is none yet; raises as `check` then."""
        with self._lock:
            self._hear()
            if queue := self.peers[rank].messages.get(channel):
                return queue.popleft()
            self._judge_what_was_heard(
                rank, doing
            )  # hearing more now could bring the message, and the goodbye behind it
        return None

    def forget(self) -> None:
        """Close this process's ends without a word: for a forked child, with whose ends open nobody would notice that
        the rank died."""
        self._closed.set()
        for peer in self.peers.values():
            peer.connection.close()

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
            for peer in self.peers.values():
                peer.send(message, timeout=self.timeout)
        if self.peers:
            self._thread.join()
        for peer in self.peers.values():
            peer.close()
        os.close(self._wake)

    def _read(self, peer: Peer) -> None:
        reads = 0
        while (peer.read(timeout=self.timeout) and reads < MOST_READS) or peer.has_more:
            reads += 1
        if peer.failure:
            self._fail(*peer.failure)

    def _fail(self, error: GradSyncError, culprit: int) -> GradSyncError:
        """Keep the first failure, and return it: later ones follow from it."""
        if self._failure is None:
            self._failure, self._culprit = error, culprit
        return self._failure
