"""What an algorithm is: how all ranks together carry out the calls of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from collective.call_tags import Array, Label
from common.tensors.reduction import Reduction

__all__ = ["Algorithm", "Repeat", "Watch", "no_repeat"]

Repeat = Callable[[Any, str, int, int, int], bool]  # of an array, an op, and a label


def no_repeat(_array: Any, _op: str, _epoch: int, _step: int, _bucket: int) -> bool:
    return False


class Watch(ABC):
    """Who wants to know of values that are not finite in what all ranks average. Called by one of these two."""

    @abstractmethod
    def look(self) -> None:
        """This rank's array is as it was given, and soon will not be."""

    @abstractmethod
    def saw(self, rank: int, elements: slice) -> None:
        """That rank's array had some among these elements, which are the mean by now."""


class Algorithm(ABC):
    """One rank's part in the group's calls. Group has checked the arguments; arrays are contiguous.

    Every method is called by all ranks in the same order. It blocks until this rank's part is done and its arrays
    may be used again; each wait lasts at most the group's timeout.

    Raises (every call):
        PeerLost, PeerStalled: a rank died, left or did not take part; it is named.
        StaleEpoch, ProtocolError: the ranks' labels, calls, sizes, dtypes or ops differ.
    """

    name: str
    rank: int
    nranks: int
    repeat: Repeat = staticmethod(no_repeat)
    """An all-reduce of a kind that there was before, at once and without checks but its own; whether it was done. If
    not, nothing was, and `all_reduce` follows."""

    @abstractmethod
    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        """An uninitialised 1-D array, 64-byte aligned, that is reached without a copy."""

    def view(self, array: Any) -> Array:
        """What a caller gives, without a copy, as an array that this algorithm works on.

        Raises:
            TypeError, ValueError: it is none, or lies elsewhere.
        """
        if not isinstance(array, np.ndarray):
            raise TypeError(f"array must be a numpy.ndarray (got {type(array).__name__})")
        return array

    def restore(self, flat: Array, array: Array) -> None:
        """Write the elements of a contiguous copy back to the array, of any layout."""
        array[...] = flat.reshape(array.shape)

    @abstractmethod
    def all_reduce(self, flat: Array, reduction: Reduction, label: Label) -> None:
        """Replace the 1-D array, on every rank, by the reduction over ranks in canonical order."""

    def all_reduce_watched(self, flat: Array, reduction: Reduction, label: Label, watch: Watch) -> None:
        """As `all_reduce`, of a mean of floats."""
        watch.look()
        self.all_reduce(flat, reduction, label)

    @abstractmethod
    def reduce_scatter(self, flat: Array, reduction: Reduction, label: Label) -> None:
        """Replace chunk `rank` of the 1-D array (tensors.buckets.chunk_bounds) by its reduction; spoil the rest."""

    @abstractmethod
    def all_gather(self, rows: Array, label: Label) -> None:
        """Fill the rows of [nranks, count], of which this rank has written its own, with those of the other ranks."""

    @abstractmethod
    def gather_chunks(self, flat: Array, label: Label) -> None:
        """Replace each chunk of the 1-D array, on every rank, by that of the rank of the same number."""

    @abstractmethod
    def broadcast(self, flat: Array, root: int, label: Label) -> None:
        """Replace the 1-D array, on every rank, by rank `root`'s."""

    def barrier(self, label: Label) -> None:
        """Block until every rank has called it."""
        self.all_gather(np.zeros((self.nranks, 1), np.uint8), label)

    def share(self, flat: Array, label: Label) -> bool:  # noqa: ARG002 - those that can use them
        """Map rank 0's memory in the place of every rank's 1-D array, whose elements are equal; whether that was done,
        on all ranks or on none."""
        return False

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Leave; a `reason` tells the other ranks that this one failed. Idempotent, never raises."""
