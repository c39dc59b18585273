"""A parser as it is fuzzed, and what must hold whatever it is given."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from common.errors import GradSyncError
from tests.fuzz.inputs import Maker, inputs

__all__ = ["CORPUS", "Finding", "Target", "found_before"]

CORPUS = Path(__file__).with_name("corpus")  # NAME/WHAT: what once broke the parser NAME, and how
MOST_S = 2.0
MOST_MEMORY = 256 << 20


class Finding(AssertionError):
    """A parser broke a promise."""


@dataclass(frozen=True)
class Target:
    """
    Args:
        parse: takes bytes of a stranger's.
        seeds: valid ones.
        more: makes further ones.
        errors: by which it may say that they are none.
    """

    name: str
    parse: Callable[[bytes], object]
    seeds: Sequence[bytes]
    more: Maker | None = None
    errors: tuple[type[Exception], ...] = (GradSyncError,)

    @property
    def inputs(self) -> st.SearchStrategy[bytes]:
        return inputs(self.seeds, self.more)

    def check(self, data: bytes) -> None:
        """
        Raises:
            Finding: another error than the named ones, too long, or too much memory.
        """
        begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            self.parse(data)
        except self.errors:
            pass
        except Exception as exc:
            raise Finding(f"{self.name}: {type(exc).__name__}: {exc}") from exc
        took, grown = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if took > MOST_S:
            raise Finding(f"{self.name}: took {took:.1f} s")
        if grown * 1024 > MOST_MEMORY:
            raise Finding(f"{self.name}: took {grown / 1024:.0f} MB of memory")


def found_before(name: str) -> list[Path]:
    """The inputs that once broke a parser."""
    folder = CORPUS / name
    return sorted(folder.iterdir()) if folder.is_dir() else []
