"""How far trainers may run apart: the consistency modes of the parameter server, by name and number."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import UsageError, choose

__all__ = ["ASYNC", "MODES", "SYNC", "Mode", "parse_mode"]

MODES = ("sync", "ssp", "async", "geo")
STALENESS, LOCAL_STEPS = 2, 4  # unless told otherwise
LIMITS = {"ssp": ("--staleness", 0, 1000), "geo": ("--local-steps", 1, 10**9)}  # of the number


@dataclass(frozen=True)
class Mode:
    """One of

    sync    every step waits for all trainers
    ssp     stale synchronous parallel (Ho et al. 2013): a trainer begins step t when all have finished t-1-s
    async   a trainer's gradients are applied on arrival; nobody waits for others (Hogwild-like, Dean et al. 2012)
    geo     a trainer updates its own parameters for k steps, then sends by how much they have changed (geo-SGD)

    Args:
        number: ssp: the staleness bound s, 0..1000; geo: the local steps k, at least 1; otherwise 0.

    Raises:
        UsageError: an unknown name, or a number that the mode cannot have.
    """

    name: str
    number: int = 0

    def __post_init__(self) -> None:
        choose("mode", self.name, MODES)
        flag, least, most = LIMITS.get(self.name, ("number", 0, 0))
        if not least <= self.number <= most:
            raise UsageError(f"{flag} must be in {least}..{most} (got {self.number})")

    def __str__(self) -> str:
        return f"{self.name}:{self.number}" if self.name in LIMITS else self.name

    @property
    def in_step(self) -> bool:
        """Whether all trainers take each step together, so that the parameters are those of sync, bit for bit."""
        return self.staleness == 0

    @property
    def staleness(self) -> int | None:
        """How many steps a trainer may be ahead of the slowest; None: any number."""
        return {"sync": 0, "ssp": self.number}.get(self.name)


SYNC, ASYNC = Mode("sync"), Mode("async")


def parse_mode(text: str) -> Mode:
    """The mode called "sync", "async", "ssp" or "ssp:S", "geo" or "geo:K".

    Raises:
        UsageError: there is none of that name.
    """
    name, colon, number = text.strip().partition(":")
    if colon and not (name in LIMITS and number.isdecimal() and number.isascii() and len(number) <= 10):
        raise UsageError(f"not a mode: {text!r}; expected sync, ssp:S, async or geo:K, as in ssp:2")
    return Mode(name, int(number) if colon else {"ssp": STALENESS, "geo": LOCAL_STEPS}.get(name, 0))
