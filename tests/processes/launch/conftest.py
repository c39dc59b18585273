"""A launcher that does not wait long for the end of its processes."""

from __future__ import annotations

import pytest

from common.launch import job as launch


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SETTLE_S", 0.3)
    monkeypatch.setattr(launch, "TERMINATE_S", 0.5)
