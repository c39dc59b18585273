"""The fingerprint of the machine."""

from __future__ import annotations

import os

from benchmarks.environment import describe_environment, installed, probe_memory


def test_it_describes_this_machine() -> None:
    found = describe_environment()
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 100_000_000
    assert found["cpu"]
    assert set(found["versions"]) >= {"gradsync", "numpy", "grpcio"}


def test_bandwidth_is_plausible() -> None:
    gigabytes_per_second, noise = probe_memory()
    assert 0.2 < gigabytes_per_second < 500
    assert noise >= 0


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert installed("no-such-package-as-this") is None
