"""Where in a program's data a training is, and how to come there again with the same batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy.typing as npt
from paddle.io import DataLoader, IterableDataset

from common.errors import UsageError
from common.paddle_api.random_states import random_arrays, set_random

__all__ = ["DataPosition"]

Arrays = Mapping[str, npt.NDArray[Any]]


class DataPosition:
    """Batches are found again by giving out those of the epoch before them once more, unseen: its loader, its workers
    and whatever random numbers they draw begin the epoch as they began it.

    Args:
        sampler: whose `epoch` says how it shuffles; None: the loader's batch sampler.
    """

    def __init__(self, sampler: Any = None) -> None:
        self._sampler = sampler
        self.epoch = self._batch = 0  # the next batch's
        self._sampler_epoch: int | None = None  # when this epoch began
        self._began: Arrays = {}  # the random states then
        self._now: Arrays = {}  # those to go on with, after a commit was loaded

    def state(self) -> dict[str, Any]:
        """Plain values."""
        sampler_epoch = self._sampler_epoch if self._batch else getattr(self._sampler, "epoch", None)
        return {"epoch": self.epoch, "batch": self._batch, "sampler_epoch": sampler_epoch}

    def began(self) -> Arrays:
        """The random states when this epoch began; none if its first batch is the next one."""
        return self._began if self._batch else {}

    def load(self, state: Mapping[str, Any], began: Arrays, now: Arrays) -> None:
        """Go on from there."""
        self.epoch, self._batch, self._sampler_epoch = state["epoch"], state["batch"], state["sampler_epoch"]
        self._began, self._now = began or now, now

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The rest of this epoch; after each, `done` is to be called.

        Raises:
            UsageError: the loader has fewer than it had.
        """
        if self._sampler is None:
            self._sampler = getattr(loader, "batch_sampler", None)
        drawn: set[str] = set()
        if now := self._now:
            drawn = drawn_by(loader)  # before its thread begins to
            set_random(self._began)
            if self._sampler_epoch is not None and hasattr(self._sampler, "epoch"):
                self._sampler.epoch = self._sampler_epoch
        self._sampler_epoch, self._began, self._now = getattr(self._sampler, "epoch", None), random_arrays(), {}
        found = iter(loader)
        if self._batch:
            self._come_back(found)
            set_random({name: state for name, state in now.items() if name not in drawn})
        yield from found

    def done(self, loader: Iterable[Any]) -> None:
        """The last batch given is used; if it is the epoch's last one, as far as is known, the next epoch begins."""
        self._batch += 1
        if self._batch == length_of(loader):
            self.end(self.epoch)

    def end(self, epoch: int) -> None:
        """That epoch has no batch any more."""
        if self.epoch == epoch:
            self.epoch, self._batch = epoch + 1, 0

    def at_end(self) -> None:
        """No batch is left: random numbers go on as they did when the last one was used."""
        set_random(self._now)
        self._now = {}

    def _come_back(self, found: Iterator[Any]) -> None:
        for number in range(self._batch):
            if next(found, self) is self:
                raise UsageError(
                    f"the commit is of batch {self._batch} of epoch {self.epoch}, which now has {number}; give the "
                    "loader the data that it had"
                )


def length_of(loader: Iterable[Any]) -> int | None:
    """In batches, where that is known."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, ValueError):  # of a stream of data
        return None


def drawn_by(loader: Iterable[Any]) -> set[str]:
    """Whose random numbers a data set draws in this process, ahead of the program: where it comes to, they are."""
    if not isinstance(loader, DataLoader) or loader.num_workers > 0 or isinstance(loader.dataset, IterableDataset):
        return set()
    before = random_arrays()
    try:
        loader.dataset[0]
        after = random_arrays()
    finally:
        set_random(before)
    return {name for name in before if before[name].tobytes() != after[name].tobytes()}
