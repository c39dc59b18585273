"""Memory in which a server keeps boundaries, and a trainer that looks into it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import pytest

from common.commit.kept_parts import KeptParts, make_kept, path_of
from common.network.gradsync_pb2 import ServerMessage
from ps.planes.wire_format import Outgoing
from tests.support.trainer_messages import Inbox

__all__ = ["Looking", "memory"]


@pytest.fixture
def memory() -> Iterator[KeptParts]:
    descriptor = make_kept()
    yield KeptParts(path_of(descriptor))
    os.close(descriptor)


class Looking(Inbox):
    """Of a trainer that looks at what is kept as soon as it hears of the end of a step."""

    def __init__(self, memory: KeptParts) -> None:
        super().__init__()
        self._memory, self.seen = memory, [0] * 0

    def put(self, messages: Iterable[ServerMessage | Outgoing], *, at: int | None = None) -> None:
        before = self.version
        super().put(messages, at=at)
        if self.version > before:
            self.seen.append(max(self._memory.steps(), default=-1))
