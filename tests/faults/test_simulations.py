"""Row 21: random schedules of a simulated job, 10,000 seeds of each scheme; a seed that fails plays the same again."""

from __future__ import annotations

import os

import pytest

from benchmarks.faults.cases import simulation
from tests.faults.jobs import SCHEMES

SEEDS = 10_000
AT_ONCE = 500
FIRST = (int(os.environ.get("GRADSYNC_FAULTS") or 1) - 1) * SEEDS  # each pass of the matrix plays others


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, AT_ONCE))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_seeds_of_a_simulation(scheme: str, first: int) -> None:
    simulation("ps" if scheme == "ps" else "ring", first, AT_ONCE)
