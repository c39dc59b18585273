"""`fleet.util` and `fleet.metrics`: sums of NumPy's arrays over all ranks, by Paddle's own code over our group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from paddle.distributed.fleet.base.util_factory import UtilBase
from paddle.distributed.fleet.metrics import metric

from common.errors import UsageError

__all__ = ["Worker", "metrics_of", "util_of"]

MODES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "max": lambda rows: rows.max(0),
    "min": lambda rows: rows.min(0),
    "mean": lambda rows: rows.mean(0),
}
METRICS = ("acc", "auc", "mae", "max", "min", "mse", "rmse", "sum")


class Worker:
    """What `UtilBase` asks a role maker: who this is, and what goes between all workers.

    Args:
        index: of this worker.
        number: of workers.
        gather: every rank's array, stacked in rank order; blocks until all have called it.
    """

    def __init__(self, index: Callable[[], int], number: Callable[[], int], gather: Callable[[Any], Any]) -> None:
        self._worker_index, self._worker_num, self._gather = index, number, gather

    def _all_reduce(self, values: Any, mode: str = "sum", comm_world: str = "worker") -> Any:
        """An array of the shape of `values`, which may be a number or a list, too."""
        check(comm_world, "all_reduce")
        if mode not in MODES:
            raise ValueError(f"all_reduce: mode must be one of {', '.join(MODES)} (got {mode!r})")
        array = np.array(values)
        return np.asarray(MODES[mode](self._gather(array))).reshape(array.shape)

    def _all_gather(self, value: Any, comm_world: str = "worker") -> list[Any]:
        """Every worker's number, or list of equally many numbers, in rank order."""
        check(comm_world, "all_gather")
        found: list[Any] = self._gather(np.array(value)).tolist()
        return found

    def _barrier(self, comm_world: str = "worker") -> None:
        check(comm_world, "barrier")
        self._gather(np.zeros(1, np.uint8))


def check(comm_world: str, what: str) -> None:
    if comm_world != "worker":
        raise UsageError(
            f"fleet.util.{what}: servers take no part in it; leave out comm_world={comm_world!r}, which means workers"
        )


def util_of(worker: Worker) -> Any:
    """A `UtilBase` of Paddle's over our group."""
    util = UtilBase()
    util._set_role_maker(worker)
    return util


def metrics_of(util: Any) -> SimpleNamespace:
    """Paddle's `fleet.metrics` over a `util` of ours; they go to Paddle's own unless they are given one."""
    return SimpleNamespace(**{name: partial(getattr(metric, name), util=util) for name in METRICS})
