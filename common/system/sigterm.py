"""How a process answers SIGTERM, by which launchers end it: in order, or at least without what looks like a crash."""

from __future__ import annotations

import os
import signal
import threading

from common.system.after_import import call_after_import

__all__ = [
    "ENGINE_VARIABLE",
    "PARENT_VARIABLE",
    "EndsHeldBack",
    "end_in_order_on_sigterm",
    "end_quietly_on_sigterm",
    "quiet_once_paddle_is_there",
]

PARENT_VARIABLE = "GRADSYNC_PARENT"  # process id of the launcher, set by it
ENGINE_VARIABLE = "GRADSYNC_ENGINE"  # what else has started this rank: Slurm, Open MPI, ...
ENDS = (signal.SIGTERM, signal.SIGINT)


class EndsHeldBack:
    """From now on SIGTERM and SIGINT are only noted, until `release`. To be made in the main thread, where Python runs
    handlers, whichever thread gets the signal; a mask would leave it to the others, such as OpenBLAS's."""

    def __init__(self) -> None:
        self._told: list[int] = []
        self._released = False
        self._before = {int(number): signal.signal(number, self._note) for number in ENDS}

    def _note(self, number: int, _: object) -> None:
        if not self._released:
            self._told.append(number)
            return
        signal.signal(number, self._before[number])  # whoever came after us has put us back
        signal.raise_signal(number)

    def release(self) -> None:
        """What has come is answered now, by whoever answers such signals by now."""
        self._released = True
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)
        for told in dict.fromkeys(self._told):
            signal.raise_signal(told)


def end_in_order_on_sigterm() -> None:
    """Have a SIGTERM raise SystemExit, so that what is under way can still be left in order; called in the main thread,
    where it is raised, and without effect in others."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)


def end_quietly_on_sigterm() -> None:
    """Under a launcher or an engine, which end ranks by SIGTERM, take away the handler that Paddle installs at its
    import behind Python's back: it writes what looks like a crash. One of the program's own, and those of real crashes,
    stay."""
    here = threading.current_thread() is threading.main_thread()
    told = PARENT_VARIABLE in os.environ or ENGINE_VARIABLE in os.environ
    if told and here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def quiet_once_paddle_is_there() -> None:
    """Have `end_quietly_on_sigterm` called when this process imports Paddle, whoever does: at once, for the rest of the
    import takes a second, and Paddle's handler may hang, since it asks for memory that the signal may have interrupted.
    """
    for name in ("paddle.base", "paddle"):  # the two that install handlers
        call_after_import(name, end_quietly_on_sigterm)
