"""Plans of reductions, kept from call to call: views of memory that lives as long as the group anyway."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["MAX_PLANS", "remember"]

MAX_PLANS = 128
K = TypeVar("K")
T = TypeVar("T")


def remember(kept: dict[K, T], key: K, value: T) -> T:
    """Keep a plan, but not too many."""
    if len(kept) >= MAX_PLANS:
        kept.clear()
    kept[key] = value
    return value
