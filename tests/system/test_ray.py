"""A training on a cluster of three nodes of Ray's on this machine. Some minutes: only with GRADSYNC_LONG_TESTS=all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.groups import ROOT, environment

pytest.importorskip("paddle")
pytest.importorskip("ray.train", exc_type=ImportError, reason="Ray is not installed (pip install '.[ray]')")
pytestmark = [
    pytest.mark.system,
    pytest.mark.longest,
    pytest.mark.timeout(400),
]


def test_both_schemes_end_with_the_same_parameters_also_after_a_killed_worker() -> None:
    done = subprocess.run(
        [sys.executable, Path("tests/programs/on_ray.py")],
        env={**environment(), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"ring", "ps", "after a kill"}
    assert found["ring"] == found["ps"] == found["after a kill"]
