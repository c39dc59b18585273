"""Trainers under the modes ssp, async and geo."""

from __future__ import annotations

import pytest

from common.tensors.arena import Layout
from ps.store.modes import ASYNC, Mode

__all__ = ["GEO", "RELAXED", "SSP", "geo_layout", "relaxed"]

SSP, GEO = Mode("ssp", 2), Mode("geo", 3)
RELAXED = [SSP, ASYNC, GEO]
relaxed = pytest.mark.parametrize("mode", RELAXED, ids=str)


def geo_layout() -> Layout:
    return Layout.of([("a", (33, 5)), ("b", (7,))])
