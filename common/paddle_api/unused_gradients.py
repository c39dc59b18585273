"""Whether the gradients at the end of a step are still to be used by an update, as with gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
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
            if update := getattr(optimizer, name, None):
                setattr(optimizer, name, self._watched(update))

    def _watched(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(update)
        def watched(*args: Any, **kwargs: Any) -> Any:
            found = update(*args, **kwargs)
            self._used = self._backwards()
            return found

        return watched

    def may_be_left(self) -> bool:
        """Whether a backward came after the last update; the program may have cleared what it gave."""
        return self._backwards() > self._used
