"""`python -m tests.faults.mutants`: one guard after the other, of mutants.toml, is switched off in a copy of the
checkout, and the test that is to notice is run, with it and without; prints which stayed green. Ten minutes."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import FAULTS_VARIABLE
from tests.support.groups import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["MUTANTS", "Mutant"]

LIMIT_S = 240.0
RED = 1  # of pytest: tests ran, and some failed


@dataclass(frozen=True)
class Mutant:
    """
    Args:
        row: of the table of faults.
        old, new: text of the file; the old one is there once.
        test: FILE and flags of pytest, as a shell has them.
    """

    row: int
    file: str
    old: str
    new: str
    test: str


MUTANTS = [Mutant(**each) for each in tomllib.loads((ROOT / "tests/faults/mutants.toml").read_text("utf-8"))["mutant"]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mutants", description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, help="by default all")
    rows = parser.parse_args().rows
    green = 0
    with tempfile.TemporaryDirectory(prefix="gradsync-mutants-") as folder:
        tree = Path(folder) / "tree"
        copy_to(tree)
        for mutant in [each for each in MUTANTS if not rows or each.row in rows]:
            noticed = told(tree, mutant)
            print(f"row {mutant.row:2}: {mutant.file}: {mutant.old.strip()[:70]!r}: {noticed}", flush=True)
            green += noticed != "red"
    return int(green > 0)


def copy_to(tree: Path) -> None:
    """All files of the checkout that git knows."""
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def told(tree: Path, mutant: Mutant) -> str:
    """Whether its test is "red", or what else came of it."""
    if code := run(tree, mutant):
        return f"pytest ended with {code} without it"
    file = tree / mutant.file
    text = file.read_text("utf-8")
    file.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    try:
        code = run(tree, mutant)
    except subprocess.TimeoutExpired:
        return "red"  # it hangs
    finally:
        file.write_text(text, "utf-8")
    return "red" if code == RED else f"pytest ended with {code}"


def run(tree: Path, mutant: Mutant) -> int:
    path, *flags = shlex.split(mutant.test)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path, *flags]
    environment = {**os.environ, FAULTS_VARIABLE: "1", "GRADSYNC_LONG_TESTS": "1", "PYTHONPATH": str(tree)}
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as process:
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


if __name__ == "__main__":
    sys.exit(main())
