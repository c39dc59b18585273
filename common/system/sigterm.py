"""How a process answers SIGTERM, by which launchers end it: in order, or at least without what looks like a crash."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection

from common.system.after_import import call_after_import

__all__ = [
    "ENGINE_VARIABLE",
    "PARENT_VARIABLE",
    "end_in_order_on_sigterm",
    "end_quietly_on_sigterm",
    "hold_back_ends",
    "let_ends_come",
    "quiet_once_paddle_is_there",
]

PARENT_VARIABLE = "GRADSYNC_PARENT"  # process id of the launcher, set by it
ENGINE_VARIABLE = "GRADSYNC_ENGINE"  # what else has started this rank: Slurm, Open MPI, ...


ENDS = (signal.SIGTERM, signal.SIGINT)


def hold_back_ends() -> set[signal.Signals]:
    """Whoever tells this process to end is answered later, from `let_ends_come` on; what was held back before."""
    return {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)}


def let_ends_come(but: Collection[signal.Signals] = ()) -> None:
    """
    Args:
        but: what is held back still.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDS} - {*but})


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
