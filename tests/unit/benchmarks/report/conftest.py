"""Results of a comparison that is certified, and of one that is not."""

from __future__ import annotations

import pytest

from tests.support.compare_samples import Results, a_run, results_of


@pytest.fixture
def good() -> Results:
    """A clear winner at N=2, a tie at N=4."""
    return results_of(
        a_run("local N=1", 1000),
        a_run("ps N=2", 1500),
        a_run("ps N=2 S=2", 1600),
        a_run("ring/shm N=2", 1840),
        a_run("ring/tcp N=2", 1700),
        a_run("ps N=4", 1750, low=1700, high=1800),
        a_run("ring/shm N=4", 1820, low=1790, high=1850),
    )
