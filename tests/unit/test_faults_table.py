"""The matrix of faults names tests that exist, and every test of its folder."""

from __future__ import annotations

import ast

import pytest

from tests.faults.__main__ import where
from tests.faults.jobs import SCHEMES
from tests.faults.mutants import MUTANTS, Mutant
from tests.faults.table import HERE, TABLE
from tests.support.groups import ROOT

NAMED = sorted({where(fault, scheme) for fault in TABLE for scheme in SCHEMES} - {""})


def functions_of(path: str) -> set[str]:
    return {
        node.name
        for node in ast.parse((ROOT / path).read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("name", NAMED)
def test_a_test_of_the_matrix_exists(name: str) -> None:
    path, _, test = name.partition("::")
    assert test in functions_of(path)


def test_every_fault_has_a_test_or_a_reason_why_not() -> None:
    assert [f for f in TABLE if not (f.ps and f.collective) and not f.why] == []
    assert {fault.row for fault in TABLE} == {*range(1, 19), 21}


def test_no_test_is_left_out() -> None:
    files = sorted((ROOT / HERE).glob("test_*.py"))
    found = {f"{HERE}/{file.name}::{test}" for file in files for test in functions_of(f"{HERE}/{file.name}")}
    assert found <= set(NAMED)


def test_each_row_that_needs_no_gpu_has_a_mutant() -> None:
    assert {mutant.row for mutant in MUTANTS} == {*range(1, 20), 21}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.row} {mutant.file}")
def test_a_mutant_can_be_made(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text("utf-8").count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert functions_of(mutant.test.split()[0])
