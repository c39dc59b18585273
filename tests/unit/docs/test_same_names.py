"""What is read where a module of the user's hides one of ours is what the page on troubleshooting says.

Ours is found on the path, as where a wheel is installed. An editable installation also finds parts of a package that
the user's hides, so the commands run without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.groups import ROOT

PATH = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("-packages"))])
NAMED_COMMON = "GradSync needs its own package 'common'"


@pytest.mark.parametrize(
    ("name", "command", "of_a_module", "of_a_package"),
    [
        (
            "ps",
            ["-m", "ps.run"],
            "__path__ attribute not found on 'ps' while trying to find 'ps.run'",
            "No module named ps.run",
        ),
        (
            "ps",
            ["-c", "import ps.fleet"],
            "No module named 'ps.fleet'; 'ps' is not a package",
            "No module named 'ps.fleet'",
        ),
        ("ps", ["-c", "import ps; ps.init()"], *["module 'ps' has no attribute 'init'"] * 2),
        ("ps", ["-m", "ps"], "", "No module named ps.__main__"),
        ("common", ["-c", "import collective"], *[NAMED_COMMON] * 2),
        (
            "common",
            ["-m", "benchmarks"],
            "No module named 'common.errors'; 'common' is not a package",
            "No module named 'common.errors'",
        ),
    ],
)
@pytest.mark.parametrize("page", ["troubleshooting.md", "troubleshooting.zh.md"])
def test_the_page_has_the_words(
    name: str, command: list[str], of_a_module: str, of_a_package: str, page: str, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / page).read_text()
    for words, path in ((of_a_module, tmp_path / f"{name}.py"), (of_a_package, tmp_path / name / "__init__.py")):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        done = subprocess.run(
            [sys.executable, "-S", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": PATH},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert words in done.stderr
        assert not words or f"`{words}`" in text
        path.unlink()
