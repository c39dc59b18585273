"""What SECURITY.md promises is shown by tests that exist, and that are not left out."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.groups import ROOT

PAGE = (ROOT / "SECURITY.md").read_text("utf-8")
TABLE = PAGE.partition("| promise | test |")[2].partition("\n\n")[0]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)


def test_every_promise_names_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")]
    assert len(rows) > 25
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::test_\w+` \|$", row)] == []


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_shows_a_promise_exists(path: str, name: str) -> None:
    (found,) = [
        node
        for node in ast.parse((ROOT / path).read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert "skip(" not in "".join(map(ast.unparse, found.decorator_list))
