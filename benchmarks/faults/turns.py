"""Threads of which one runs at a time, by a clock of their own: what happens depends on nothing but a seed.

    actor A   runs ... waits  ->  plays what is due, until that wakes somebody  ->  hands the turn to B
    actor B                                                                         runs ... waits -> ...

An actor is a thread of its own, since what it runs blocks where it likes. Who waits takes what is due from a heap of
events; the clock shows the time of the last one.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from types import TracebackType

from benchmarks.faults.simulated import PromiseBroken

__all__ = ["Actor", "Killed", "Turns"]

MOST_EVENTS = 20_000
MOST_S = 600.0  # of the simulated clock


class Killed(BaseException):
    """Ends an actor's thread; whatever it runs must not handle this."""


class Actor:
    """Runs `main` on a thread of its own, which begins with its first turn.

    Attributes:
        frozen_until: it gets no turn before, unless it is killed.
    """

    def __init__(self, turns: Turns, main: Callable[[], None]) -> None:
        self._turns, self._main = turns, main
        self._baton = threading.Lock()
        self._baton.acquire()
        self._thread: threading.Thread | None = None
        self.waits = 0  # so many it has begun
        self.is_killed = self.is_over = False
        self.frozen_until = 0.0

    def begins(self) -> None:
        """Its turn has come, for the first time or once more."""

    def moment(self, what: str) -> None:
        """It comes to a point at which something may happen to it."""

    def take_turn(self) -> None:
        """Called by who has it until now."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._baton.release()

    def wait_for_turn(self) -> None:
        self._baton.acquire()

    def end(self) -> None:
        """After the seed: let its thread end."""
        self.is_killed = True
        if self._thread is not None:
            if not self.is_over:
                self._baton.release()
            self._thread.join()

    def _run(self) -> None:
        try:
            if not self.is_killed:
                self.begins()
                self._main()
        except Killed:
            pass
        except BaseException as exc:
            self._turns.fail(exc)
        self.is_over = True
        self._turns.pass_on()


class Turns:
    """A context manager; when it is left, all threads have ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order, self._played = count(), 0
        self._events: list[tuple[float, int, Callable[[], Actor | None]]] = []
        self._actors: list[Actor] = []
        self._done = threading.Semaphore(0)
        self._over = False
        self._error: BaseException | None = None

    def clock(self) -> float:
        return self.now

    def at(self, moment: float, happen: Callable[[], object]) -> None:
        """It does not wait, and wakes nobody but by `wake`."""

        def event() -> None:
            happen()

        self._put(moment, event)

    def add(self, actor: Actor, moment: float) -> None:
        """It has its first turn then."""
        self._actors.append(actor)
        self.wake(actor, moment)

    def wake(self, actor: Actor, moment: float) -> None:
        """Give it a turn then, if it still waits as it does now."""
        self._put(moment, partial(self._woken, actor, actor.waits))

    def run(self) -> None:
        """Until nothing is left to happen, or `finish`.

        Raises:
            PromiseBroken: somebody waits for ever. Whatever an actor or event raises.
        """
        self.pass_on()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, actor: Actor) -> None:
        """Called by the actor whose turn it is, until it is woken.

        Raises:
            Killed: it does not live any more.
        """
        actor.waits += 1
        following = self._next()
        if following is not actor:
            if following is None:
                self._done.release()
            else:
                following.take_turn()
            actor.wait_for_turn()
        if actor.is_killed:
            raise Killed
        actor.begins()

    def sleep(self, actor: Actor, seconds: float) -> None:
        self.wake_next(actor, self.now + seconds)
        self.wait(actor)

    def wake_next(self, actor: Actor, moment: float) -> None:
        """As `wake`, for the wait that it is about to begin."""
        self._put(moment, partial(self._woken, actor, actor.waits + 1))

    def pass_on(self) -> None:
        """By who does not wait any more."""
        if self._over:
            return
        following = self._next()
        if following is None:
            self._done.release()
        else:
            following.take_turn()

    def finish(self) -> None:
        """Nothing happens any more."""
        self._events.clear()

    def fail(self, error: BaseException) -> None:
        """What went wrong first is what `run` raises."""
        self._error = self._error or error
        self.finish()

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._over = True
        for actor in self._actors:
            actor.end()

    def _put(self, moment: float, event: Callable[[], Actor | None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), event))

    def _next(self) -> Actor | None:
        """Play what is due until somebody is woken; None: nothing is left, or something went wrong."""
        try:
            while self._events:
                self.now, _, event = heapq.heappop(self._events)
                self._played += 1
                if self._played > MOST_EVENTS or self.now > MOST_S:
                    raise PromiseBroken(f"somebody waits for ever: {self._played} events in {self.now:.0f} s")
                if (actor := event()) is not None:
                    return actor
        except BaseException as exc:
            self.fail(exc)
        return None

    def _woken(self, actor: Actor, number: int) -> Actor | None:
        if actor.is_over or actor.waits != number:
            return None
        if actor.frozen_until > self.now and not actor.is_killed:
            self._put(actor.frozen_until, partial(self._woken, actor, number))
            return None
        return actor
