"""How often Python's threads take turns: more often while ranks meet, otherwise as the program has it.

A program whose own threads race, such as two readers that draw from one generator, shall do so no more often than under
Paddle.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["switch_often", "switching_often"]

OFTEN_S = 5e-4  # at the default 5 ms a busy thread costs 54 us a backward hook

_lock = threading.Lock()
_inside = 0
_outside = 0.0


def switch_often() -> None:
    """From now on, in a process that runs nothing of a user's."""
    sys.setswitchinterval(min(OFTEN_S, sys.getswitchinterval()))


@contextmanager
def switching_often() -> Iterator[None]:
    """While any thread is in here."""
    global _inside, _outside
    with _lock:
        if _inside == 0:
            _outside = sys.getswitchinterval()
            switch_often()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                sys.setswitchinterval(_outside)
