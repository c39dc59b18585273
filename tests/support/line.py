"""A stream between two launchers without a network."""

from __future__ import annotations

from typing import Any

__all__ = ["Line"]


class Line:
    """One end of a stream; in the place of a MessageStream."""

    def __init__(self) -> None:
        self.other: Any = self
        self.come: list[bytes] = []
        self.gone = ""

    def send(self, message: bytes) -> None:
        self.other.come.append(message)

    def take(self) -> list[bytes]:
        come, self.come = self.come, []
        return come
