"""Results as files: their kinds, the schemas that they are checked against, and the folder that keeps their history."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
import tempfile
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from textwrap import shorten
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from benchmarks.records.environment import describe_environment
from common.errors import GradSyncError, UsageError

__all__ = ["SCHEMA", "check_history", "head_of_results", "kind_of", "problem", "withdraw", "write_results"]

SCHEMA = 1  # the version that every kind has so far
EVERY_KIND = "results"  # the schema of what all kinds have in common


def head_of_results(kind: str) -> dict[str, Any]:
    """What results of every kind begin with: what they are, when and by which command they came about, and where."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "environment": describe_environment(),
    }


def kind_of(results: Any) -> str:
    """ "compare", "script" (compare script.py), "sweep", "crossover" or a later kind; "" for none of ours."""
    if not isinstance(results, dict) or not {"schema", "created", "environment"} <= results.keys():
        return ""
    if "kind" in results:
        return str(results["kind"])
    if isinstance(results.get("rows"), list):
        return "sweep"
    certificate = results.get("certificate")
    if not isinstance(results.get("runs"), list) or not isinstance(certificate, dict):
        return ""
    return "script" if "against_paddle" in certificate else "compare"


def problem(results: Any) -> str:
    """Where results break their kind's schema (benchmarks/schemas), in one line; "" if they don't. A kind without a
    schema must have what all have."""
    for name in (EVERY_KIND, kind_of(results)):
        file = files("benchmarks") / "schemas" / f"{name}.json"
        if re.fullmatch(r"[a-z_]+", name) and file.is_file():
            found = best_match(Draft202012Validator(json.loads(file.read_text())).iter_errors(results))
            if found is not None:
                return f"{found.json_path}: {shorten(found.message, 200, placeholder=' ...')}"
    return ""


def check_history(folder: Path | None) -> None:
    """Find out before measuring whether its results can be kept there.

    Raises:
        UsageError: they cannot.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as exc:
        raise UsageError(f"cannot write to --history {folder}: {exc.strerror}") from exc


def withdraw(folder: Path, *names: str) -> None:
    """Remove what an earlier run has left: this one computed the wrong thing, so its speed is not to be believed."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def write_results(results: dict[str, Any], path: Path, history: Path | None) -> None:
    """Write results to `path`, and as a new file to the folder `history`, if there is one: named by UTC time, kind and
    commit, as in 20261121T083000Z-sweep-f8074a6e05.json.

    Raises:
        GradSyncError: they break their schema; then they are in `path` only.
    """
    text = json.dumps(results, indent=1) + "\n"
    path.write_text(text)
    if reason := problem(json.loads(text)):
        raise GradSyncError(f"{path} breaks the schema of its kind and is not for use: {reason}")
    if history is None:
        return
    moment = re.sub(r"\D", "", results["created"][:19])
    name = f"{moment[:8]}T{moment[8:]}Z-{kind_of(results)}-{results['environment'].get('commit') or 'unknown'}"
    for number in itertools.count(1):  # nothing is ever overwritten
        try:
            with (history / f"{name}{f'-{number}' if number > 1 else ''}.json").open("x") as file:
                file.write(text)
        except FileExistsError:
            continue
        return
