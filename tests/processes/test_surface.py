"""An unmodified program that uses what Fleet has beside training, under both launchers."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

from tests.support import warm
from tests.support.groups import ROOT

PROGRAM = ROOT / "tests" / "programs" / "surface.py"

pytestmark = pytest.mark.processes


def run(scheme: str, folder: Path, kind: str) -> tuple[list[dict[str, Any]], str]:
    """What each of two ranks tells, in rank order, and all that was said."""
    done = warm.run(
        [sys.executable, "-m", f"{scheme}.run", "--nranks", "2", "--log-dir", str(folder), str(PROGRAM), kind],
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    logs = [path.read_text(errors="replace") for path in sorted(folder.glob("workerlog.*"))]
    assert done.returncode == 0, done.stderr + "".join(logs)
    return [
        json.loads(each) for log in logs for each in re.findall(r"^RESULT (.*)$", log, re.MULTILINE)
    ], done.stderr + "".join(logs)


def test_a_program_that_uses_fleets_surface_is_told_the_same_by_both_schemes(tmp_path: Path) -> None:
    found = {scheme: run(scheme, tmp_path / scheme, "train") for scheme in ("ps", "collective")}
    (told, said), (told_by_ring, _) = found["ps"], found["collective"]
    assert told == told_by_ring
    assert said.count("ONCE") == 1
    parameters = {each.pop("parameters") for each in told}
    assert len(parameters) == 1
    for rank, each in enumerate(told):
        assert each == {
            "rank": [rank] * 4,
            "ranks": [2, 2, 2, 1],
            "first": [rank == 0, True, False, False],
            "model": 1,
            "util": [[3.0, 20.0], [2.0, 10.0], [1.0, 10.0]],
            "gathered": [0, 1],
            "files": [["a", "b"], ["c"]][rank],
            "fleet": 7,
            "acc": [3.0 / 20.0] * 2,
            "sum": [3.0, 20.0],
        }


@pytest.mark.parametrize("scheme", ["ps", "collective"])
def test_a_program_that_only_asks_for_its_rank_ends_well(tmp_path: Path, scheme: str) -> None:
    told, said = run(scheme, tmp_path, "asks")
    assert told == [{"rank": rank, "ranks": 2, "files": 2} for rank in range(2)]
    assert ("ps.run: no rank of" in said) is (scheme == "ps")
