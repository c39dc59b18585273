"""Whether the gradients at the end of a step are still to be used by an update, as with gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

__all__ = ["UnusedGradients"]

UPDATES = ("step", "minimize", "_apply_optimize")  # of Paddle's optimizers; some call one another


class UnusedGradients:
    """Sees which of backward and update came last.

    Args:
        optimizer: whose updates use the gradients; they are watched from now on.
        backwards: how many there were so far.
    """

    def __init__(self, optimizer: Any, backwards: Callable[[], int]) -> None:
        self._backwards, self._used = backwards, backwards()
        for name in UPDATES:
            if hasattr(optimizer, name):
                setattr(optimizer, name, self._watched(name, optimizer))

    def _watched(self, name: str, optimizer: Any) -> MethodType:
        """A method, so that a copy of the optimizer has its own."""
        given = vars(optimizer).get(name)  # by the program, for this one

        def watched(one: Any, *args: Any, **kwargs: Any) -> Any:
            found = (given or partial(getattr(type(one), name), one))(*args, **kwargs)
            self._used = self._backwards()
            return found

        return MethodType(watched, optimizer)

    def may_be_left(self) -> bool:
        """Whether a backward came after the last update; the program may have cleared what it gave."""
        return self._backwards() > self._used
