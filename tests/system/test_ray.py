"""Trainings on a cluster of three nodes of Ray's on this machine. Minutes: only with GRADSYNC_LONG_TESTS=all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.groups import ROOT, environment

pytest.importorskip("paddle")
pytest.importorskip("ray.train", exc_type=ImportError, reason="Ray is not installed (pip install '.[ray]')")
pytestmark = [
    pytest.mark.system,
    pytest.mark.longest,
    pytest.mark.timeout(400),
]
PROGRAMS = "tests/programs"


def run(*command: str) -> str:
    """What a command of Python's has written."""
    told = {**environment(), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *command], env=told, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_trainer_of_rays_ends_with_the_bits_of_our_launcher_also_after_a_killed_worker() -> None:
    ours = run("-m", "collective.run", "--nranks", "2", f"{PROGRAMS}/cnn.py").split("digest ")[1].split()[0]
    found = json.loads(run(f"{PROGRAMS}/on_ray.py").splitlines()[-1])
    assert found == {"ring": ours, "ps": ours, "after a kill": ours}
