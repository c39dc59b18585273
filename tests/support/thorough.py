"""What `make test` takes a part of and `make test-long` all."""

from __future__ import annotations

import os

__all__ = ["ALL", "LONG", "examples"]

LONG = bool(os.environ.get("GRADSYNC_LONG_TESTS"))
ALL = os.environ.get("GRADSYNC_LONG_TESTS") == "all"  # also what takes minutes more: every contract over TLS


def examples(quick: int, thorough: int) -> int:
    """How many cases Hypothesis draws."""
    return thorough if LONG else quick
