"""What a verb fills in to measure its contestants in rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, TypeVar

from rich.console import Console

from benchmarks.records.result_files import AnyResults

__all__ = ["Measurement", "OnRun", "there_and_back"]

R = TypeVar("R", bound=AnyResults)
T = TypeVar("T")
OnRun = Callable[..., None]  # told what is about to run, and what it costs, if that is not 1


class Measurement(ABC, Generic[R]):
    """Contestants, one round of them, and the record that it makes; `benchmarks.measuring.run` does the rest.

    Attributes:
        file: the results' name in the folder --out.
        report: the name of the reports beside it, without .md and .html.
    """

    file: ClassVar[str]
    report: ClassVar[str]

    @property
    @abstractmethod
    def rounds(self) -> int:
        """How many to make; asked for when all is prepared."""

    @abstractmethod
    def cost(self) -> int:
        """Of everything: the sum of what `on_run` will be told."""

    @abstractmethod
    def prepared(self, on_run: OnRun) -> AbstractContextManager[None]:
        """While this is entered, the contestants' processes run; certificates come first."""

    @abstractmethod
    def make_round(self, number: int, on_run: OnRun) -> None:
        """Measure every contestant once."""

    def finish(self, on_run: OnRun) -> None:
        """Measure what is measured once, after all rounds."""

    @abstractmethod
    def state(self) -> Any:
        """What was measured so far, as JSON can carry it."""

    @abstractmethod
    def restore(self, kept: Any) -> None:
        """Take up such a state, before the first round."""

    def keep_whole_rounds(self) -> bool:
        """After an interruption: whether anything is left that results can be made of."""
        return False

    @abstractmethod
    def results(self, *, interrupted: bool = False) -> R:
        """Of all that was measured so far."""

    def usable(self, results: R) -> bool:  # noqa: ARG002
        """Whether a job may show what there is before the last round."""
        return True

    @abstractmethod
    def show(self, results: R, console: Console) -> None:
        """On the terminal."""

    def judge(self, results: R) -> None:
        """Last of all.

        Raises:
            GradSyncError: what is wrong with the results, which are written.
        """


def there_and_back(contestants: Sequence[T], number: int) -> Sequence[T]:
    """Every other round goes backwards, so that nobody is always last."""
    return contestants[:: 1 if number % 2 == 0 else -1]
