"""What `make test` takes a part of, and `make test-long` the rest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["ALL", "LONG", "and_long", "examples"]

LONG = bool(os.environ.get("GRADSYNC_LONG_TESTS"))
ALL = os.environ.get("GRADSYNC_LONG_TESTS") == "all"  # also what takes minutes more: every contract over TLS


def and_long(few: Sequence[Any], every: Sequence[Any]) -> list[Any]:
    """Parameters of a test: a few, and in `make test-long` the others of all, which are marked so."""
    return [*few, *(pytest.param(*each, marks=pytest.mark.long) for each in every if LONG and each not in few)]


def examples(quick: int, thorough: int) -> int:
    """How many cases Hypothesis draws."""
    return thorough if LONG else quick
