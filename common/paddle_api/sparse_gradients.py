"""Gradients of sparse embeddings: not a value for each row of the table, but the rows that a batch has read.

The mean over ranks is the ranks' rows one after the other, in rank order and unmerged, their values times 1/N: what
Paddle's own DataParallel makes of them. They go to the program's own optimizer; servers only pass them on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt
import paddle
from paddle import nn

from common.paddle_api.gradient_hooks import Named
from common.sync.synchronizer import Synchronizer

__all__ = ["SparseGradients", "sparse_parameters"]


def sparse_parameters(model: Any) -> set[int]:
    """The `id` of every parameter that is the table of an Embedding with sparse gradients."""
    layers = model.sublayers(include_self=True)
    return {id(layer.weight) for layer in layers if isinstance(layer, nn.Embedding) and layer._sparse}


class SparseGradients:
    """
    Args:
        named: the tables, in the same order on all ranks.
    """

    def __init__(self, named: Named, synchronizer: Synchronizer) -> None:
        self.named, self._synchronizer = named, synchronizer
        self.reached = False  # by the backward under way
        self._open = True
        for _, p in named:
            p._register_backward_hook(self._hook())

    def stop(self) -> None:
        """Take no more notice; Paddle cannot take a hook back."""
        self._open = False

    def average(self) -> None:
        """Replace each table's gradient by the mean over ranks; blocks until all ranks have called it."""
        if not self.named:
            return
        mine = [rows_and_values(p) for _, p in self.named]
        counts = self._synchronizer.all_gather(np.array([rows.size for rows, _ in mine], np.int64))
        for (_, p), (rows, values), many in zip(self.named, mine, counts.T.tolist(), strict=True):
            if any(many):
                put(p, self._joined(rows, many), self._joined(values, many) * dtype_of_table(p).type(1 / len(many)))

    def _joined(self, mine: npt.NDArray[Any], many: Sequence[int]) -> npt.NDArray[Any]:
        """All ranks' rows, of which rank r has `many[r]`."""
        padded = np.zeros((max(many), *mine.shape[1:]), mine.dtype)
        padded[: len(mine)] = mine
        everyones = self._synchronizer.all_gather(padded)
        return np.concatenate([each[:count] for each, count in zip(everyones, many, strict=True)])

    def _hook(self) -> Callable[[], None]:
        mine = ref(self)  # as in gradient_hooks.py

        def accumulated() -> None:
            gradients = mine()
            if gradients is not None and gradients._open:
                gradients.reached = True

        return accumulated


def dtype_of_table(p: Any) -> np.dtype[Any]:
    return np.dtype(str(p.dtype).rpartition(".")[2])


def rows_and_values(p: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(numbers of rows, int64 [K]; their values, [K, ...]) of a table's gradient; none if it has no gradient."""
    if p.grad is None or not p.grad._is_initialized():
        return np.zeros(0, np.int64), np.zeros((0, *p.shape[1:]), dtype_of_table(p))
    if not p.grad.is_selected_rows():  # the program has put another one there, or reads the table otherwise, too
        return np.arange(p.shape[0]), p.grad.numpy()
    found = p.grad.get_selected_rows()
    return np.array(found.rows(), np.int64), np.array(found.get_tensor())


def put(p: Any, rows: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    """Make these rows the table's gradient."""
    if p.grad is not None and not p.grad.is_selected_rows():
        p.clear_gradient(False)
    if p.grad is None:  # one is made by backward only
        nn.functional.embedding(paddle.to_tensor([0]), p, sparse=True).sum().backward()
    found = p.grad.get_selected_rows()
    found.get_tensor().set(np.ascontiguousarray(values), paddle.CPUPlace())
    found.set_rows(rows.tolist())
