"""`python -m benchmarks results`: write out/results.md, a list of the results that lie under benchmarks/results."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records.environment import machine_of
from benchmarks.records.result_files import AnyResults, read, sort_of
from benchmarks.reports.writing import REPORTS
from common.errors import UsageError
from common.system.atomic_file import write_file

__all__ = ["ResultsConfig", "list_results", "to_markdown", "verdict"]

HEAD = """# Committed results

Written by `python -m benchmarks results` from the files under `{folder}`; don't edit. What the figures mean is in
[performance.md](performance.md).
"""
NONE = "\nNo results are committed yet.\n"


@dataclass(frozen=True, kw_only=True)
class ResultsConfig:
    """Write the list of committed results: what, command, machine, date, commit, verdict, report."""

    folder: Path = Path("benchmarks/results")
    """Where results lie, in folders of any depth; of its folder `history` each run is one line."""
    out: Path = Path("out/results.md")
    """The list."""
    check: bool = False
    """Write nothing; exit code 1 if the list is not current."""


def list_results(config: ResultsConfig) -> int:
    """
    Raises:
        DataError: a file cannot be read, or breaks its schema.
        UsageError: its folder cannot be made.
        FileNotWritten: the list cannot be written.
    """
    text = to_markdown(config.folder, config.out.parent)
    if config.check:
        current = config.out.exists() and config.out.read_text() == text
        print(f"{config.out} is {'' if current else 'not '}current")
        return int(not current)
    try:
        config.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError(f"cannot write to --out {config.out}: {exc.strerror}") from exc
    write_file(config.out, text)
    print(f"results: {config.out}")
    return 0


def to_markdown(folder: Path, home: Path) -> str:
    """The whole list.

    Args:
        home: the folder that it will lie in, for its links.
    """
    history = folder / "history"
    found = [(path, read(path)) for path in sorted(folder.rglob("*.json")) if sort_of(path)]
    entries = [_entry(path, results, home) for path, results in found if history not in path.parents]
    runs = [_line(path, results, home) for path, results in found if history in path.parents]
    table = ["## History", "", "| UTC | kind | commit | command |", "|---|---|---|---|", *runs, ""]
    parts = [HEAD.format(folder=os.path.relpath(folder, home.parent)), *entries]
    return "\n".join([*parts, *(table if runs else [])]) + ("" if found else NONE)


def verdict(results: AnyResults) -> list[str]:
    """In plain sentences: those of the kind's own report."""
    return REPORTS[results.kind].verdict(results)


def _entry(path: Path, results: AnyResults, home: Path) -> str:
    machine = results.environment
    lines = [
        f"## {_escape(path.parent.name)}: {results.kind}, {results.created[:10]}",
        "",
        *(f"- {_escape(sentence)}" for sentence in verdict(results)),
        "",
        f"`{results.command}`",
        "",
        f"{_escape(machine_of(machine))}; {_moment(results)}; "
        f"commit {machine.commit or 'unknown'}; {_links(path, home)}",
        "",
    ]
    return "\n".join(lines)


def _line(path: Path, results: AnyResults, home: Path) -> str:
    kind = f"[{results.kind}]({os.path.relpath(path, home)})"
    command = results.command.replace("|", "\\|")
    return f"| {_moment(results)} | {kind} | {results.environment.commit or 'unknown'} | `{command}` |"


def _moment(results: AnyResults) -> str:
    return f"{results.created[:16].replace('T', ' ')} UTC"


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
