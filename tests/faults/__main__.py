"""`make faults`: the matrix of faults, some times in a row, with real processes; prints how each cell fared."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as Xml
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.jobs import SCHEMES
from tests.faults.table import HERE, TABLE, Fault
from tests.support.groups import ROOT

__all__: list[str] = []

Outcomes = dict[str, list[str]]  # by FILE::TEST, of each of its cases "NAME", or "NAME: what became of it"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, help="of the matrix; by default all")
    parser.add_argument("--times", type=int, default=1, help="how often in a row")
    parser.add_argument("--workers", type=int, default=2)
    flags = parser.parse_args()
    faults = [each for each in TABLE if not flags.rows or each.row in flags.rows]
    passed = {(fault, scheme): 0 for fault in faults for scheme in SCHEMES}
    failures: list[str] = []
    for number in range(1, flags.times + 1):
        begin = time.monotonic()
        outcomes = run(sorted({where(each, s) for each in faults for s in SCHEMES} - {""}), number, flags.workers)
        for fault, scheme in passed:
            cases = cases_of(fault, scheme, outcomes)
            bad = [f"pass {number}, {scheme}: {case}" for case in cases if ": " in case]
            passed[fault, scheme] += bool(cases) and not bad
            failures += bad
        print(f"pass {number} took {time.monotonic() - begin:.0f} s, {len(failures)} failures so far", flush=True)
    Console(width=110).print(table_of(faults, passed, flags.times))
    print("\n".join(failures) or f"all passed {flags.times} times in a row")
    wanted = [cell for cell in passed if where(*cell)]
    return 0 if all(passed[cell] == flags.times for cell in wanted) else 1


def where(fault: Fault, scheme: str) -> str:
    """From the checkout's root; "": nowhere."""
    test = fault.ps if scheme == "ps" else fault.collective
    return test if not test or test.startswith("tests/") else f"{HERE}/{test}"


def run(tests: list[str], number: int, workers: int) -> Outcomes:
    """All these tests, once."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            str(workers),
            "--dist",
            "worksteal",
            f"--junitxml={report}",
        ]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests],
            cwd=ROOT,
            env={**os.environ, "GRADSYNC_FAULTS": str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode or number == 1:
            print(done.stdout, flush=True)
        cases = Xml.parse(report).iter("testcase")
        outcomes: Outcomes = {}
        for case in cases:
            name = str(case.get("name"))
            file = str(case.get("classname")).replace(".", "/") + ".py"
            wrong = [child for child in case if child.tag in ("failure", "error", "skipped")]
            told = f"{name}: {wrong[0].tag}: {wrong[0].get('message')}" if wrong else name
            outcomes.setdefault(f"{file}::{name.partition('[')[0]}", []).append(told)
    return outcomes


def cases_of(fault: Fault, scheme: str, outcomes: Outcomes) -> list[str]:
    """Of the scheme, or all where the test is no scheme's."""
    cases = outcomes.get(where(fault, scheme), [])
    others = [each for each in SCHEMES if each != scheme]
    return [case for case in cases if not set(parameters_of(case)) & set(others)]


def parameters_of(case: str) -> list[str]:
    return case.partition("[")[2].partition("]")[0].split("-")


def table_of(faults: list[Fault], passed: dict[tuple[Fault, str], int], times: int) -> Table:
    table = Table("row", "case", *SCHEMES, title=f"Passed, of {times}")
    for fault in faults:
        cells = [str(passed[fault, scheme]) if where(fault, scheme) else f"({fault.why})" for scheme in SCHEMES]
        table.add_row(str(fault.row), fault.case, *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
