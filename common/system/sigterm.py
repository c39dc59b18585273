"""How a process answers SIGTERM, by which launchers end it: in order, or at least without what looks like a crash."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["PARENT_VARIABLE", "end_in_order_on_sigterm", "end_quietly_on_sigterm", "quiet_once_paddle_is_there"]

PARENT_VARIABLE = "GRADSYNC_PARENT"  # process id of the launcher, set by it


def end_in_order_on_sigterm() -> None:
    """Have a SIGTERM raise SystemExit, so that what is under way can still be left in order; called in the main thread,
    where it is raised, and without effect in others."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)


def end_quietly_on_sigterm() -> None:
    """Under a launcher, which ends ranks by SIGTERM, take away the handler that Paddle installs at its import behind
    Python's back: it writes what looks like a crash. One of the program's own, and those of real crashes, stay."""
    here = threading.current_thread() is threading.main_thread()
    if PARENT_VARIABLE in os.environ and here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def quiet_once_paddle_is_there() -> None:
    """Have `end_quietly_on_sigterm` called when this process imports Paddle, whoever does: at once, for the rest of the
    import takes a second, and Paddle's handler may hang, since it asks for memory that the signal may have interrupted.
    """
    if not any(isinstance(finder, AfterPaddle) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterPaddle())


class AfterPaddle:
    """Finds Paddle's modules as Python does, and calls `end_quietly_on_sigterm` after the two that install handlers."""

    def __init__(self) -> None:
        self._awaited = {"paddle.base", "paddle"}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._awaited:
            return None
        self._awaited.remove(name)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_quiet(module: ModuleType) -> None:
                execute(module)
                end_quietly_on_sigterm()

            spec.loader.exec_module = then_quiet  # type: ignore[method-assign]
        return spec
