"""A rank beyond its group's: the others are told, so that they do not wait for one that never comes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from common.errors import GradSyncError, UsageError
from common.launch.settings import check_rank

__all__ = ["TELL_S", "check_rank_aloud"]

TELL_S = 2.0  # for the place where ranks meet to answer
MOST = (1 << 32) - 1  # as a rank is sent


def check_rank_aloud(rank: int, nranks: int, tell: Callable[[float], object]) -> None:
    """As check_rank.

    Args:
        tell: joins the group as this rank within so many seconds, which fails the group by name.

    Raises:
        UsageError: the rank is outside 0..nranks-1.
    """
    try:
        check_rank(rank, nranks)
    except UsageError:
        if 1 <= nranks <= rank <= MOST:
            with suppress(GradSyncError):
                tell(TELL_S)
        raise
