"""`ParallelEnv`: this rank's place as a type of Paddle's, with all its fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle.distributed.parallel

from common.launch.settings import Placement

__all__ = ["parallel_env_of"]

PADDLES: Any = vars(paddle.distributed.parallel)["ParallelEnv"]  # also where ours is installed in its place


def parallel_env_of(placement: Callable[[], Placement]) -> Any:
    """A subclass of Paddle's ParallelEnv that knows the rank and the number of ranks that a scheme has; what it says of
    rings, time limits and devices is Paddle's.

    Args:
        placement: where this rank is now; a role maker may say otherwise than the launcher.
    """

    class ParallelEnv(PADDLES):  # type: ignore[misc]
        __doc__ = PADDLES.__doc__

        def __init__(self) -> None:
            super().__init__()
            place = placement()
            self._rank, self._world_size = place.rank, place.nranks
            self._trainer_endpoints = list(place.endpoints)
            self._current_endpoint = place.endpoints[min(place.rank, len(place.endpoints) - 1)]
            self.__dict__.setdefault("_device_id", 0)  # Paddle's has none in its builds for CPUs

    return ParallelEnv
