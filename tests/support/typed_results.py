"""Results of which a test names only the fields that matter to it, completed to whole ones."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

from msgspec import convert, inspect

from benchmarks.records.accuracy import AccuracyResults
from benchmarks.records.compare import CompareResults, RankRecord
from benchmarks.records.crossover import CrossoverResults
from benchmarks.records.faults import FaultsResults
from benchmarks.records.programs import ProgramsResults
from benchmarks.records.result_files import AnyResults, plain
from benchmarks.records.scale import ScaleResults
from benchmarks.records.script import ProgramRecord, ScriptResults
from benchmarks.records.suite import SuiteResults
from benchmarks.records.sweep import SweepResults
from benchmarks.verbs import diff

__all__ = ["completed", "load", "program_record", "rank_record", "typed"]

STRUCTS: dict[str, type] = {
    "compare": CompareResults,
    "script": ScriptResults,
    "sweep": SweepResults,
    "crossover": CrossoverResults,
    "accuracy": AccuracyResults,
    "faults": FaultsResults,
    "scale": ScaleResults,
    "programs": ProgramsResults,
    "suite": SuiteResults,
}
NAMED = {"mode": "sync"}
PLAIN: tuple[tuple[type, Any], ...] = (
    (inspect.StrType, ""),
    (inspect.FloatType, 1.0),
    (inspect.BoolType, False),
    (inspect.ListType, []),
    (inspect.DictType, {}),
    (inspect.UnionType, None),  # of something and None
)


def completed(content: dict[str, Any], kind: str = "") -> dict[str, Any]:
    """`content` with a value for every field that it lacks and that results of its kind must have."""
    found: dict[str, Any] = complete(inspect.type_info(STRUCTS[kind or content["kind"]]), content)
    return {"schema": 1, "kind": kind or content["kind"], **found}


def typed(content: dict[str, Any], kind: str = "") -> Any:
    """The same as a struct."""
    results: AnyResults = convert(completed(content, kind), AnyResults, str_keys=True)
    return results


def load(path: Path) -> dict[str, Any]:
    """What a file holds, checked as `diff` does."""
    return plain(diff.load(path))


def rank_record(**fields: Any) -> RankRecord:
    """A training as rank 0 saw it."""
    return convert(complete(inspect.type_info(RankRecord), fields), RankRecord)


def program_record(**fields: Any) -> ProgramRecord:
    """A whole run of a program."""
    return convert(complete(inspect.type_info(ProgramRecord), fields), ProgramRecord)


def complete(wanted: Any, content: Any) -> Any:
    if isinstance(wanted, inspect.Metadata):
        return complete(wanted.type, content)
    if isinstance(wanted, inspect.UnionType):
        structs = [each for each in wanted.types if isinstance(each, inspect.StructType)]
        chosen = [
            each for each in structs if len(structs) == 1 or (isinstance(content, dict) and each.tag == content["kind"])
        ]
        return complete(chosen[0], content) if chosen and content is not None else content
    if isinstance(wanted, inspect.StructType) and isinstance(content, dict):
        fields = {each.encode_name: each for each in wanted.fields}
        lacking = {name: each.type for name, each in fields.items() if each.required and name not in content}
        more = {name: NAMED.get(name, made(kind)) for name, kind in lacking.items()}
        return more | {
            key: complete(fields[key].type, value) if key in fields else value for key, value in content.items()
        }
    if isinstance(wanted, inspect.ListType) and isinstance(content, list):
        return [complete(wanted.item_type, each) for each in content]
    if isinstance(wanted, inspect.DictType) and isinstance(content, dict):
        return {key: complete(wanted.value_type, value) for key, value in content.items()}
    return content


def made(wanted: Any) -> Any:
    if isinstance(wanted, inspect.Metadata):
        return made(wanted.type)
    if isinstance(wanted, inspect.StructType):
        return complete(wanted, {})
    if isinstance(wanted, inspect.StrType) and wanted.pattern:
        return "2026-01-01T00:00:00+00:00"  # of `created` alone
    if isinstance(wanted, inspect.IntType):
        return 1 if wanted.ge is None else wanted.ge
    if isinstance(wanted, inspect.LiteralType):
        return wanted.values[0]
    if isinstance(wanted, inspect.TupleType):
        return [made(each) for each in wanted.item_types]
    return copy(next(value for kind, value in PLAIN if isinstance(wanted, kind)))
