"""Results as files: reading and writing them, and the folder that keeps their history."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.records.faults import FaultsResults
from benchmarks.records.programs import ProgramsResults
from benchmarks.records.scale import ScaleResults
from benchmarks.records.suite import PartResults, SuiteResults
from common.errors import DataError, GradSyncError, UsageError
from common.system.atomic_file import write_file

__all__ = ["SCHEMA", "AnyResults", "check_history", "plain", "read", "sort_of", "withdraw"]
__all__ += ["write_results"]

MOST_BYTES = 1 << 28  # of a file of results
SCHEMA = 1  # the version that every kind has so far
AnyResults = PartResults | SuiteResults | FaultsResults | ProgramsResults | ScaleResults
# Written and parsed by json: a training that diverged has losses of NaN, for which msgspec writes null.


class Sort(msgspec.Struct):
    """What is looked at before the rest of a file."""

    schema: int
    kind: str
    created: str


def read(path: Path) -> AnyResults:
    """The results in a file, checked.

    Raises:
        DataError: it cannot be read, holds none, or none that this version understands.
    """
    content, sort = _look_at(path)
    if sort is None:
        raise DataError(f"{path} holds no results of python -m benchmarks")
    if sort.schema != SCHEMA:
        raise DataError(f"{path} has schema {sort.schema}, this version reads {SCHEMA}; use the one that wrote it")
    try:
        found: AnyResults = msgspec.convert(content, AnyResults, str_keys=True)
        return found
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        raise DataError(f"{path} breaks the schema of its kind: {exc}") from exc


def sort_of(path: Path) -> str:
    """The kind of the results in a file; "" for JSON of another sort, such as a trace.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    _, sort = _look_at(path)
    return sort.kind if sort else ""


def _look_at(path: Path) -> tuple[object, Sort | None]:
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise DataError(f"{path} has {size:,} bytes; results have at most {MOST_BYTES:,}")
        content = json.loads(path.read_bytes())
    except OSError as exc:
        raise DataError(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{path} is not JSON: {exc}") from exc
    try:
        return content, msgspec.convert(content, Sort)
    except (msgspec.ValidationError, UnicodeEncodeError):  # JSON may hold half a character, which is no text
        return content, None


def plain(results: msgspec.Struct) -> dict[str, Any]:
    """As whoever reads the file with a JSON parser has it."""
    found: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(results, str_keys=True)))
    return found


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


def write_results(results: AnyResults, path: Path, history: Path | None) -> None:
    """Write results to `path`, and as a new file to the folder `history`, if there is one: named by UTC time, kind and
    commit, as in 20261121T083000Z-sweep-f8074a6e05.json.

    Raises:
        GradSyncError: they break their schema; then they are in `path` only.
    """
    text = (json.dumps(plain(results), indent=1) + "\n").encode()
    write_file(path, text)
    try:
        msgspec.convert(json.loads(text), type(results), str_keys=True)
    except msgspec.ValidationError as exc:
        raise GradSyncError(f"{path} breaks the schema of its kind and is not for use: {exc}") from exc
    if history is None:
        return
    moment = re.sub(r"\D", "", results.created[:19])
    name = f"{moment[:8]}T{moment[8:]}Z-{results.kind}-{results.environment.commit or 'unknown'}"
    for number in itertools.count(1):  # nothing is ever overwritten
        try:
            with (history / f"{name}{f'-{number}' if number > 1 else ''}.json").open("xb") as file:
                file.write(text)
        except FileExistsError:
            continue
        return
