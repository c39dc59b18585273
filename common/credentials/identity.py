"""How a process shows that it belongs: its certificate and key, and the authority that all members have theirs from."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MEMBER_NAME", "Identity"]

MEMBER_NAME = "gradsync"  # in every member's certificate, so that other certificates of an authority are of no use


@dataclass(frozen=True)
class Identity:
    """In PEM."""

    certificate: bytes  # with those between it and the authority's
    key: bytes = field(repr=False)
    authority: bytes
