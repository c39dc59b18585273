"""Commands that are ended with the test that has started them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.commands import Started, end_all


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start(*command: object, through: Sequence[str] = ()) -> Started:
        folder = tmp_path / f"process-{len(started)}"
        folder.mkdir()
        started.append(Started(folder, *command, through=through))
        return started[-1]

    yield start
    end_all(started)
