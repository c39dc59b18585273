"""Paddle's optimizer on a server's slice; the only module of `ps` that needs Paddle."""

from __future__ import annotations

from common.errors import UsageError
from common.optimizers import Optimizer
from ps.store import Store, Updater

__all__ = ["make_updater"]


def make_updater(optimizer: Optimizer, store: Store) -> Updater:
    """The optimizer that the trainers asked for, on the store's parameters and averaged gradients.

    Raises:
        UsageError: Paddle is not installed here.
    """
    try:
        from common.flat_optimizer import FlatOptimizer
    except ImportError as exc:
        raise UsageError(
            f"this server cannot apply {optimizer.name}: Paddle is not installed here; pip install paddlepaddle"
        ) from exc
    return FlatOptimizer(optimizer, store.parameters, store.gradients)
