"""Commands that are ended with the test that has started them, and a place for their temporary files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kills import run
from tests.processes.conftest import start

__all__ = ["own_temporary_folder", "run", "start"]


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other launcher clears away."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
