"""Commands that are ended with the test that has started them, and a place for their temporary files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.jobs import Once
from tests.faults.kills import run
from tests.processes.conftest import start

__all__ = ["once", "own_temporary_folder", "run", "start"]


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other launcher clears away."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """What is made by the first test that asks for it, whichever worker runs it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def once(name: str, make: Callable[[], str]) -> str:
        made = folder / f"once {name}"
        with (folder / f"once {name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                made.write_text(make())
            return made.read_text()

    return once
