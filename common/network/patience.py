"""How long others are waited for: `--timeout` for one that gives no sign of life, `--wait-limit` for one that does.

Signs of life come from a thread beside the training, which answers those who wait and ask. It needs Python's lock for a
moment: a process that is stopped, whose host is gone, or in which a single call holds that lock all the time, gives
none. Who asks does so every tenth of its timeout, at most ASK_S apart, so that one answer in time is enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from common.errors import PeerStalled, UsageError

__all__ = ["ALIKE", "STUCK", "WAIT_LIMIT_S", "Patience", "check_limits"]

ALIKE = "all ranks must make the same number of steps and of calls between ranks"
STUCK = "every rank waits for another one: their calls differ"
WAIT_LIMIT_S = 1800.0  # as Paddle's own groups
ASK_S = 3.0
MOST_NAMED = 4  # of those who wait


class Patience:
    """Of one process, with those it waits for.

    Args:
        timeout: how long it waits without a sign of life, seconds.
        wait_limit: how long it waits for a process that lives, seconds; at least the timeout.
    """

    def __init__(self, timeout: float, wait_limit: float = WAIT_LIMIT_S) -> None:
        self.timeout, self.wait_limit = timeout, wait_limit
        self._say_at = 0.0  # of a wait that has lasted so long; 0: of one that has outlasted the timeout
        self._asked_at = -math.inf

    def asks(self, now: float, waited: float) -> bool:
        """Whether to ask for signs of life now; to be asked again and again by who has waited so long, seconds."""
        every = min(self.timeout / 10, ASK_S)
        if waited < every or now - self._asked_at < every:
            return False
        self._asked_at = now
        return True

    def ends(
        self, silent: Mapping[int, float], waited: float, *, doing: str = "", asker: str = "", stuck: bool = False
    ) -> PeerStalled | None:
        """What to fail with, if this was too long.

        Args:
            silent: the ranks that are waited for, and for how many seconds each gave no sign of life.
            waited: how long the wait has lasted, seconds.
            doing: what the ranks should take part in, with a blank before it.
            asker: who waits, and in what.
            stuck: they wait as well, for others.
        """
        context = f" ({asker})" if asker else ""
        if frozen := [rank for rank, seconds in silent.items() if seconds > self.timeout]:
            return PeerStalled(
                f"rank {named(frozen)} did not take part{doing} for {self.timeout:g} s{context}; it gives no sign of "
                "life (--timeout): it is stopped or in a debugger, or its host is gone"
            )
        if stuck:
            return PeerStalled(
                f"rank {named(silent)} did not take part{doing} for {self.timeout:g} s{context}; {STUCK}"
            )
        limit = max(self.timeout, self.wait_limit)
        if waited <= limit:
            return None
        flag = "--wait-limit" if self.wait_limit >= self.timeout else "--timeout"
        return PeerStalled(
            f"rank {named(silent)} did not take part{doing} for {limit:g} s{context}; it is alive, but slower than "
            f"{flag} allows: raise that if it only computes"
        )

    def remark(self, waiting: Sequence[int], late: Sequence[int], step: int | None, waited: float) -> str:
        """A line about a wait that has outlasted the timeout, once for each doubling; else ""."""
        if waited < self.timeout:
            self._say_at = 0.0
        if waited <= max(self.timeout, self._say_at) or not late or not waiting:
            return ""
        self._say_at = self.timeout * 2 ** (math.floor(math.log2(waited / self.timeout)) + 1)
        who = named(waiting) if len(waiting) <= MOST_NAMED else f"{waiting[0]} and {len(waiting) - 1} others"
        verb = "waits" if len(waiting) == 1 else "wait"
        at = "" if step is None else f", at step {step}"
        lives = "it is" if len(late) == 1 else "they are"
        return f"rank {who} {verb} for rank {named(late)}{at}, for {waited:.0f} s; {lives} alive"


def named(ranks: Sequence[int] | Mapping[int, float]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def check_limits(timeout: float, wait_limit: float) -> None:
    """
    Raises:
        UsageError: a limit is no positive number of seconds.
    """
    for flag, value in (("--timeout", timeout), ("--wait-limit", wait_limit)):
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{flag} must be a positive number (got {value})")
