"""Who takes part in a comparison: a scheme with its back end, on a number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import choose

__all__ = ["PADDLE_SCHEMES", "SCHEMES", "Contestant", "line_up"]

SCHEMES = ("local", "ps", "ring")
PADDLE_SCHEMES = ("paddle", "paddle-default")  # paddle.DataParallel with our malloc setting, and with its own


@dataclass(frozen=True)
class Contestant:
    """One column of the comparison."""

    scheme: str
    backend: str  # "none", "grpc", "shm", "tcp"
    nranks: int
    servers: int = 0

    @property
    def name(self) -> str:
        """As people read it: "ring/tcp N=4", "ps/shm N=2 S=2"."""
        backend = f"/{self.backend}" if self.scheme in ("ps", "ring") else ""
        servers = f" S={self.servers}" if self.servers > 1 else ""
        return f"{self.scheme}{backend} N={self.nranks}{servers}"


def line_up(
    schemes: Sequence[str],
    nranks: Sequence[int],
    backends: Sequence[str],
    servers: Sequence[int],
    data_planes: Sequence[str],
) -> list[Contestant]:
    """Every sensible combination, by number of ranks.

    `local` takes part with one rank only. One rank has nobody to talk to, so there one server and the first back end
    or data plane stand for all; the other data planes take part with the first number of servers only.

    Raises:
        UsageError: an unknown scheme.
    """
    found: list[Contestant] = []
    for count in sorted(set(nranks)):
        for scheme in schemes:
            choose("scheme", scheme, SCHEMES)
            if scheme == "local" and count == 1:
                found.append(Contestant("local", "none", 1))
            elif scheme == "ps":
                pairs = [(data_planes[0], s) for s in servers] + [(plane, servers[0]) for plane in data_planes[1:]]
                found += [Contestant("ps", plane, count, s) for plane, s in (pairs if count > 1 else pairs[:1])]
            elif scheme == "ring":
                found += [Contestant("ring", b, count) for b in (backends if count > 1 else backends[:1])]
    return found
