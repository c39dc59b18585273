"""Fault points: what a launcher makes of GRADSYNC_FAULT, and that a process strikes there and nowhere else."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from common.errors import UsageError
from common.system.fault_points import COMMIT_FILES, FAULT_HERE_VARIABLE, POINTS, STAGES, Fault, fault_for
from tests.support.groups import ROOT

STRIKES = """
from common.system.fault_points import reach
for step in range(5):
    reach("stored", step)
    reach("pushed", step)
    print(step, flush=True)
"""


@pytest.mark.parametrize(
    ("who", "life", "text", "told"),
    [
        ("rank 1", 0, "", ""),
        ("rank 1", 0, "pushed:1:3", "pushed:3:kill"),
        ("rank 0", 0, "pushed:1:3", ""),
        ("rank 1", 1, "pushed:1:3", ""),
        ("server 1", 0, "stored:s1:0:stop", "stored:0:stop"),
        ("rank 1", 0, "stored:s1:0", ""),
        ("rank 0", 2, "pushed:1:3,,joined:0:0:exit", "joined:0:exit"),
    ],
)
def test_one_process_of_one_life_is_told(who: str, life: int, text: str, told: str) -> None:
    assert fault_for(who, life, text) == told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pushd:1:3", "unknown fault point 'pushd'; did you mean 'pushed'?"),
        ("pushed:1", r"a fault must be POINT:WHO:STEP\[:ACTION\], as in pushed:1:3:kill \(got step ''\)"),
        ("pushed:1:3:burn", "unknown action 'burn'"),
    ],
)
def test_what_is_no_fault_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fault_for("rank 0", 0, text)


def test_a_process_strikes_at_its_point_and_step() -> None:
    environment = {**os.environ, FAULT_HERE_VARIABLE: str(Fault("pushed", 2))}
    ended = subprocess.run(
        [sys.executable, "-c", STRIKES], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (-9, "0\n1\n")
    assert ended.stderr.startswith("GRADSYNC_FAULT_HERE=pushed:2:kill at ")


def test_every_point_is_passed_by_somebody() -> None:
    found = {f"{file}-{stage}" for file in COMMIT_FILES for stage in STAGES}  # commit/test_folder.py
    for package in ("collective", "common", "ps"):
        for path in (ROOT / package).rglob("*.py"):
            if "reach(" in (text := path.read_text()):
                calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
                passed = [call.args[0] for call in calls if getattr(call.func, "id", "") == "reach"]
                found |= {name.value for name in passed if isinstance(name, ast.Constant)}
    assert found == POINTS.keys()
