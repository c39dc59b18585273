"""The walk on the architecture page leads through code that exists."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.groups import ROOT

PLACE = re.compile(r"`((?:benchmarks|collective|common|ps)/[\w/]+(?:\.py|/)?)(?::([\w.]+))?`")
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def names_in(path: str) -> set[str]:
    """What a module defines: functions, classes, and their methods as Class.method."""
    names: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def test_the_page_names_many_places() -> None:
    assert len(PLACE.findall(PAGE)) > 40


@pytest.mark.parametrize(("path", "name"), sorted(set(PLACE.findall(PAGE))))
def test_a_place_on_the_page_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists(), f"docs/architecture.md names {path}"
    if name:
        assert name in names_in(path), f"docs/architecture.md names {name} of {path}"
