"""A program that imports a scheme, and that an engine has started as one of several tasks: it is a rank as under a
launcher."""

from __future__ import annotations

import os

from common.launch.engines import RENDEZVOUS_VARIABLE, Task, task_from
from common.launch.settings import placement_from

__all__ = ["adopt", "adopted"]

_adopted: Task | None = None


def adopt() -> Task | None:
    """Have this process's environment say what a launcher's would, for Paddle's own classes and for children.

    Returns:
        The task that it is; None: it is none, or a launcher has told it already.

    Raises:
        UsageError: what the engine says contradicts itself.
    """
    global _adopted
    task = task_from()
    if task is None or task.placed or task.count == 1:
        return None
    place = placement_from()
    os.environ.update(task.environment(place.rank, place.nranks))
    if place.rendezvous:
        os.environ[RENDEZVOUS_VARIABLE] = place.rendezvous
    _adopted = task
    return task


def adopted() -> Task | None:
    """What `adopt` has found in this process."""
    return _adopted
