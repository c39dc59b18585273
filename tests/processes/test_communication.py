"""A program that calls what paddle.distributed has, unmodified under both launchers: NumPy's values, the same bits."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.support import warm
from tests.support.groups import ROOT

PROGRAM = ROOT / "tests" / "programs" / "communication.py"
HAS_MESSENGER = {"collective": True, "ps": importlib.util.find_spec("ps.client.messenger") is not None}
SCHEMES = [
    pytest.param(scheme, marks=pytest.mark.skipif(not there, reason=f"{scheme} has no messenger yet"))
    for scheme, there in HAS_MESSENGER.items()
]

pytestmark = pytest.mark.processes


def run(scheme: str, folder: Path, *words: str, code: int = 0) -> tuple[list[str], str]:
    """(RESULT lines in order, all that was said) of three ranks; `words`: flags, the program and what is its own."""
    log = folder / scheme
    done = warm.run(
        [sys.executable, "-m", f"{scheme}.run", "--nranks", "3", "--log-dir", str(log), *words],
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
    )
    said = done.stderr + "".join(p.read_text(errors="replace") for p in sorted(log.glob("workerlog.*")))
    assert done.returncode == code, said
    return sorted(re.findall(r"^(RESULT .*)$", said, re.MULTILINE)), said


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_program_with_an_object_of_its_own_needs_the_flag(tmp_path: Path, scheme: str) -> None:
    """Everything before that object works."""
    found, said = run(scheme, tmp_path, str(PROGRAM), "objects", code=2)
    assert found == []
    assert "UsageError: an object of type __main__.Mine cannot be sent" in said
    assert "with --allow-pickle (GRADSYNC_ALLOW_PICKLE=1) others can, too" in said


def test_every_call_gives_the_same_bits_under_both_schemes(tmp_path: Path) -> None:
    """And with the flag objects of the program's own arrive."""
    found = {s: run(s, tmp_path, "--allow-pickle", str(PROGRAM), "objects")[0] for s, t in HAS_MESSENGER.items() if t}
    assert [line.split()[1] for line in found["collective"]] == ["0", "1", "2"]
    assert all(each == found["collective"] for each in found.values())
