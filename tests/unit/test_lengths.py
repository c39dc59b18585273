"""No file over 400 lines and no function over 60: what is longer is more than one thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.groups import ROOT

FOLDERS = ("benchmarks", "collective", "common", "docs", "examples", "ps", "tests")
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
GENERATED = "_pb2.py"


def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not path.name.endswith(GENERATED)]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """The name of every function of a file, and its lines from `def` to its last."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert len(lengths) > 200
    assert {name: lines for name, lines in lengths.items() if lines > LINES_OF_A_FILE} == {}


def test_no_function_is_too_long() -> None:
    lengths = {f"{path.relative_to(ROOT)}:{name}": lines for path in sources() for name, lines in functions(path)}
    assert len(lengths) > 3000
    assert {name: lines for name, lines in lengths.items() if lines > LINES_OF_A_FUNCTION} == {}
