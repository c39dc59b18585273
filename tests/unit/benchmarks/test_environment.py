"""The fingerprint of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.records.environment import describe_environment, installed, open_mpi, probe_memory


def test_it_describes_this_machine() -> None:
    found = describe_environment()
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_bytes > 100_000_000
    assert found.cpu
    assert set(found.versions) >= {"gradsync", "numpy", "grpcio"}


def test_bandwidth_is_plausible() -> None:
    gigabytes_per_second, noise = probe_memory()
    assert 0.2 < gigabytes_per_second < 500
    assert noise >= 0


def test_open_mpi_says_its_version_and_nobody_else_is_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    mpirun = tmp_path / "mpirun"
    for told, found in [("mpirun (Open MPI) 4.1.4", {"Open MPI": "4.1.4"}), ("HYDRA build details", {})]:
        mpirun.write_text(f"#!/bin/sh\necho '{told}'\n")
        mpirun.chmod(0o755)
        assert open_mpi() == found
    mpirun.write_text("#!/bin/sh\nexit 1\n")
    assert open_mpi() == {}


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert installed("no-such-package-as-this") is None
