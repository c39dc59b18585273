"""`benchmarks programs` over programs of our own: under Paddle and under both schemes, by one command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from benchmarks.programs.manifest import MANIFEST, Program, digest_of
from tests.support.groups import ROOT, environment

pytestmark = [pytest.mark.system, pytest.mark.long]

UNCHANGED = "programs/unchanged.py"


def test_two_programs_end_in_paddles_bits_under_both_schemes(tmp_path: Path) -> None:
    (tmp_path / "own+tests").symlink_to(ROOT / "tests")
    program = Program(name="", repository="own/tests", commit="", path=UNCHANGED, sha256="")
    shared = f'repository = "own/tests"\npath = "{UNCHANGED}"\nsha256 = "{digest_of(program, tmp_path)}"\n'
    entries = "".join(
        f'\n[[programs]]\nname = "{kind}"\nshared = "all"\narguments = ["{kind}"]\n'
        for kind in ("data_parallel", "fleet")
    )
    manifest = tmp_path / MANIFEST.name
    manifest.write_text(f'[commits]\n"own/tests" = "0"\n[shared.all]\n{shared}{entries}')
    flags = ["--programs", tmp_path, "--manifest", manifest, "--out", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "programs", *map(str, flags)],
        timeout=110,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "out/programs.json").read_text())["programs"]
    found = [(each["name"], each["collective"]["how"], each["ps"]["how"]) for each in outcomes]
    assert found == [("data_parallel", "same bits", "same bits"), ("fleet", "same bits", "same bits")]
