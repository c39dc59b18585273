"""`python -m benchmarks results`: write docs/results.md, a list of the results that lie under benchmarks/results."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result_files import SCHEMA, kind_of, problem
from benchmarks.sweep_config import size_in_words
from common.errors import DataError, UsageError

__all__ = ["ResultsConfig", "list_results", "to_markdown", "verdict"]

HEAD = """# Committed results

Written by `python -m benchmarks results` from the files under `{folder}`; don't edit. What the figures mean is in
[performance.md](performance.md).
"""
NONE = "\nNo results are committed yet.\n"
Results = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ResultsConfig:
    """Write the list of committed results: what, command, machine, date, commit, verdict, report."""

    folder: Path = Path("benchmarks/results")
    """Where results lie, in folders of any depth; of its folder `history` each run is one line."""
    out: Path = Path("docs/results.md")
    """The list."""
    check: bool = False
    """Write nothing; exit code 1 if the list is not current."""


def list_results(config: ResultsConfig) -> int:
    """
    Raises:
        DataError: a file cannot be read, or breaks its schema.
        UsageError: the list cannot be written.
    """
    text = to_markdown(config.folder, config.out.parent)
    if config.check:
        current = config.out.exists() and config.out.read_text() == text
        print(f"{config.out} is {'' if current else 'not '}current")
        return int(not current)
    try:
        config.out.write_text(text)
    except OSError as exc:
        raise UsageError(f"cannot write to --out {config.out}: {exc.strerror}") from exc
    return 0


def to_markdown(folder: Path, home: Path) -> str:
    """The whole list.

    Args:
        home: the folder that it will lie in, for its links.
    """
    history = folder / "history"
    found = [(path, results) for path in sorted(folder.rglob("*.json")) if (results := load(path)) is not None]
    entries = [_entry(path, results, home) for path, results in found if history not in path.parents]
    runs = [_line(path, results, home) for path, results in found if history in path.parents]
    table = ["## History", "", "| UTC | kind | commit | command |", "|---|---|---|---|", *runs, ""]
    parts = [HEAD.format(folder=os.path.relpath(folder, home.parent)), *entries]
    return "\n".join([*parts, *(table if runs else [])]) + ("" if found else NONE)


def load(path: Path) -> Results | None:
    """The results in a file; None for JSON of another sort, such as a trace.

    Raises:
        DataError: it is not JSON, or breaks the schema of its kind.
    """
    try:
        results = json.loads(path.read_text())
    except ValueError as exc:
        raise DataError(f"{path} is not JSON: {exc}") from exc
    if not kind_of(results):
        return None
    if results["schema"] == SCHEMA and (reason := problem(results)):
        raise DataError(f"{path} breaks the schema of its kind: {reason}")
    return dict(results)


def verdict(results: Results) -> list[str]:
    """In plain sentences: those of the kind's own report, `benchmarks/<kind>_report.py`, or ours."""
    kind = kind_of(results)
    if results["schema"] != SCHEMA:
        return [f"This version reads schema {SCHEMA}, not {results['schema']}."]
    name = "benchmarks.report" if kind == "compare" else f"benchmarks.{kind}_report"
    try:
        sentences: Callable[[Results], list[str]] = importlib.import_module(name).verdict
    except ModuleNotFoundError as exc:
        if exc.name != name:
            raise
        sentences = OWN.get(kind, lambda _: [f"This version has no words for results of kind {kind}."])
    return sentences(results)


def sweep_verdict(results: Results) -> list[str]:
    """Of the largest size at each number of ranks: every backend, the fastest first, and how near to its limit."""
    rows = results["rows"]
    if any(row["wrong"] for row in rows):
        return ["Some sums were wrong, so there is no speed to report."]
    found = []
    for nranks in sorted({row["nranks"] for row in rows}):
        mine = [row for row in rows if row["nranks"] == nranks and row["backend"] != "link"]
        largest = max((row["bytes"] for row in mine), default=0)
        ranked = sorted((row for row in mine if row["bytes"] == largest), key=lambda row: row["time_ms"])
        named = [f"{row['backend']} {row['time_ms']:.3g} ms{_of_limit(row)}" for row in ranked]
        found.append(f"{results.get('op', 'all_reduce')}, N={nranks}, {size_in_words(largest)}: {', '.join(named)}.")
    return found


def _of_limit(row: dict[str, Any]) -> str:
    return f" ({row['of_limit']:.0%} of its limit)" if row.get("of_limit") else ""


def script_verdict(results: Results) -> list[str]:
    """The bits first, then each contestant, then who failed."""
    certificate = results["certificate"]
    if not certificate["identical"]:
        return ["The bits are NOT the same under all schemes, so there is no speed to report."]
    if not certificate["passed"]:
        return ["The parameters are too far from paddle.DataParallel's, so there is no speed to report."]
    several = len(certificate["ours"]) > 1
    bits = "The bits are the same under every scheme of ours." if several else "There were no bits to compare."
    steps = []
    for run in sorted(results["runs"], key=lambda run: (run["nranks"], run["step_ms"])):
        low, high = run["step_ms_interval"]
        steps.append(f"{run['contestant']}: {run['step_ms']:.1f} ms a step ({low:.1f}–{high:.1f}).")
    return [bits, *steps, *(f"{name} failed: {why['reason']}" for name, why in results.get("failed", {}).items())]


OWN = {"sweep": sweep_verdict, "script": script_verdict}


def _entry(path: Path, results: Results, home: Path) -> str:
    machine = results["environment"]
    lines = [
        f"## {_escape(path.parent.name)}: {kind_of(results)}, {results['created'][:10]}",
        "",
        *(f"- {_escape(sentence)}" for sentence in verdict(results)),
        "",
        f"`{results.get('command')}`",
        "",
        f"{_escape(str(machine.get('cpu')))}, {machine.get('cores')} cores; {_moment(results)}; "
        f"commit {machine.get('commit') or 'unknown'}; {_links(path, home)}",
        "",
    ]
    return "\n".join(lines)


def _line(path: Path, results: Results, home: Path) -> str:
    kind = f"[{kind_of(results)}]({os.path.relpath(path, home)})"
    command = str(results.get("command")).replace("|", "\\|")
    return f"| {_moment(results)} | {kind} | {results['environment'].get('commit') or 'unknown'} | `{command}` |"


def _moment(results: Results) -> str:
    return f"{results['created'][:16].replace('T', ' ')} UTC"


def _links(path: Path, home: Path) -> str:
    """To the reports beside a file, and to itself."""
    beside = [path.with_suffix(end) for end in (".html", ".md")] + [
        path.parent / f"report{e}" for e in (".html", ".md")
    ]
    return ", ".join(_link(file, home) for file in [*_existing(beside), path])


def _existing(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.exists()]


def _link(path: Path, home: Path) -> str:
    return f"[{path.name}]({os.path.relpath(path, home)})"


def _escape(text: str) -> str:
    return re.sub(r"([\\|*_`\[])", r"\\\1", text).replace("<", "&lt;").replace("\n", " ")
