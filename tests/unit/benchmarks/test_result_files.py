"""Files of results: kinds, schemas, the history; and the list of what is committed."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.records.compare import CompareResults
from benchmarks.records.result_files import check_history, plain, read, sort_of, write_results
from benchmarks.reports.writing import write_report
from benchmarks.verbs.results import ResultsConfig, list_results, to_markdown, verdict
from common.errors import DataError, GradSyncError, UsageError
from tests.support.compare_samples import a_run, results_of
from tests.support.groups import ROOT
from tests.support.typed_results import completed, typed

Results = dict[str, Any]
MACHINE = {"cpu": "Some CPU", "cores": 2, "commit": "f8074a6e05"}
TOP = {"created": "2026-11-21T08:30:05+00:00", "command": "python -m benchmarks", "environment": MACHINE}
ROW = {"backend": "tcp", "nranks": 4, "bytes": 10**8, "time_ms": 9.5, "time_ms_interval": [9, 11], "wrong": 0}
ROWS = [{**ROW, "of_limit": 0.9}, {**ROW, "backend": "gloo", "time_ms": 5, "of_limit": None}]
SWEEP = completed({**TOP, "op": "all_reduce", "rows": ROWS}, "sweep")
RUN = {"contestant": "ps N=2", "scheme": "ps", "nranks": 2, "step_ms": 7, "step_ms_interval": [6, 8]}
CERTIFICATE = {"identical": True, "passed": True, "ours": ["ps", "ring"]}
FAILED = {"paddle N=2": {"reason": "exit code 1"}}
SCRIPT = completed({**TOP, "certificate": CERTIFICATE, "runs": [RUN], "failed": FAILED}, "script")
COMPARE = completed({**TOP, "certificate": {"identical": True, "passed": True, "steps": 5}}, "compare")


def test_the_kind_of_a_file_is_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for results in (SWEEP, SCRIPT, COMPARE):
        file.write_text(json.dumps(results))
        assert sort_of(file) == results["kind"] == read(file).kind
    for other in ({"traceEvents": []}, [1], None, {**SWEEP, "kind": 3}):
        file.write_text(json.dumps(other))
        assert sort_of(file) == ""
        with pytest.raises(DataError, match=r"x.json holds no results of python -m benchmarks$"):
            read(file)


@pytest.mark.parametrize("results", [SWEEP, SCRIPT, COMPARE])
def test_what_is_written_is_what_was_read(results: Results, tmp_path: Path) -> None:
    write_results(typed(results), tmp_path / "x.json", None)
    assert json.loads((tmp_path / "x.json").read_text()) == plain(typed(results))
    assert read(tmp_path / "x.json") == typed(results)


@pytest.mark.parametrize(
    ("good", "path", "bad", "text"),
    [
        (SWEEP, ("rows", 1, "time_ms"), "5", "Expected `float`, got `str` - at `$.rows[1].time_ms`"),
        (SWEEP, ("rows", 0, "time_ms"), -1, "Expected `float` > 0.0 - at `$.rows[0].time_ms`"),
        (
            SWEEP,
            ("rows", 0, "time_ms_interval"),
            [1],
            "Expected `array` of length 2, got 1 - at `$.rows[0].time_ms_interval`",
        ),
        (SWEEP, ("rows", 0), {}, "missing required field `backend` - at `$.rows[0]`"),
        (SCRIPT, ("certificate", "ours"), None, "Expected `array`, got `null` - at `$.certificate.ours`"),
        (COMPARE, ("created",), "yesterday", "at `$.created`"),
        (COMPARE, ("schema",), 2, "x.json has schema 2, this version reads 1"),
        (COMPARE, ("environment", "cores"), 0, "Expected `int` >= 1 - at `$.environment.cores`"),
        (COMPARE, ("kind",), "later", "Invalid value 'later' - at `$.kind`"),
    ],
)
def test_what_breaks_a_schema_is_one_line(
    good: Results, path: tuple[Any, ...], bad: Any, text: str, tmp_path: Path
) -> None:
    results = copy.deepcopy(good)
    place: Any = results
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = bad
    (tmp_path / "x.json").write_text(json.dumps(results))
    with pytest.raises(DataError) as caught:
        read(tmp_path / "x.json")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_is_added_to_the_history_and_nothing_overwritten(tmp_path: Path) -> None:
    history = tmp_path / "a" / "history"
    check_history(history)
    for time in (1.0, 2.0):
        write_results(typed({**SWEEP, "rows": [{**ROW, "time_ms": time}]}), tmp_path / "sweep.json", history)
    unknown = {**COMPARE, "environment": {**COMPARE["environment"], "commit": None}}
    write_results(typed(unknown), tmp_path / "results.json", history)
    write_results(typed(SCRIPT), tmp_path / "script.json", None)
    names = [
        "20261121T083005Z-compare-unknown",
        "20261121T083005Z-sweep-f8074a6e05",
        "20261121T083005Z-sweep-f8074a6e05-2",
    ]
    assert sorted(path.name for path in history.iterdir()) == sorted(f"{name}.json" for name in names)
    times = [json.loads((history / f"{name}.json").read_text())["rows"][0]["time_ms"] for name in names[1:]]
    assert times == [1.0, 2.0]


def test_results_that_break_their_schema_are_kept_but_not_as_history(tmp_path: Path) -> None:
    wrong = replace(typed(SWEEP), rows=[replace(typed(SWEEP).rows[0], nranks=0)])
    text = r"sweep.json breaks the schema of its kind and is not for use: .* at `\$.rows\[0\]"
    with pytest.raises(GradSyncError, match=text):
        write_results(wrong, tmp_path / "sweep.json", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


def test_a_history_that_cannot_be_written_is_known_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"^cannot write to --history .*/file: File exists$"):
        check_history(tmp_path / "file")
    check_history(None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """benchmarks/results of a checkout."""
    found = tmp_path / "benchmarks" / "results"
    files = {"one/sweep.json": SWEEP, "two/script.json": SCRIPT, "history/20261121T083005Z-sweep-f80.json": SWEEP}
    files |= {"three/results.json": COMPARE, "four/trace.json": {"traceEvents": []}}
    for name, results in files.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(json.dumps(results))
    for name in ("one/sweep.md", "three/report.html", "three/report.md"):
        (found / name).write_text("")
    return found


def test_the_list_says_what_where_when_and_the_verdict(folder: Path, tmp_path: Path) -> None:
    text = to_markdown(folder, tmp_path / "docs")
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    names = ("one: sweep", "three: compare", "two: script")
    assert heads == [*(f"## {name}, 2026-11-21" for name in names), "## History"]
    assert "`benchmarks/results`" in text
    assert "- N=4: our best reaches 90% at 100 MB of the machine's limit." in text
    assert "- paddle N=2 failed: exit code 1.\n" in text
    assert "- No two of ours have the same N" in text
    machine = "Some CPU, 2 cores; 2026-11-21 08:30 UTC; commit f8074a6e05; "
    at = "../benchmarks/results"
    assert f"{machine}[sweep.md]({at}/one/sweep.md), [sweep.json]({at}/one/sweep.json)\n" in text
    assert f"[report.html]({at}/three/report.html), [report.md]({at}/three/report.md), [results.json]" in text
    assert f"| 2026-11-21 08:30 UTC | [sweep]({at}/history/2026" in text
    assert "trace" not in text


def test_a_training_that_diverged_is_kept_and_reported(tmp_path: Path) -> None:
    run = {
        **a_run("ps N=2", 900),
        "loss": {"first": 2.3, "last": float("nan")},
        "curve": [[0.0, 2.3], [1.0, float("nan")]],
    }
    write_results(typed(results_of(run)), tmp_path / "results.json", None)
    found = read(tmp_path / "results.json")
    assert isinstance(found, CompareResults)
    assert math.isnan(found.runs[0].loss.last)
    write_report(found, tmp_path, "report", "en")
    assert "2.30→nan" in (tmp_path / "report.md").read_text()


def test_wrong_results_have_no_speed() -> None:
    wrong = typed({**SWEEP, "rows": [{**ROW, "wrong": 1}]})
    assert verdict(wrong) == ["The sums are WRONG from tcp N=4; no speed is shown."]
    for key, text in (("identical", "NOT the same"), ("passed", "too far from paddle.DataParallel")):
        first, *_ = verdict(typed({**SCRIPT, "certificate": {**SCRIPT["certificate"], "passed": False, key: False}}))
        assert text in first
        assert "no speed is shown" in first


def test_writing_and_checking_the_list(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.md"
    assert list_results(ResultsConfig(folder=folder, out=out, check=True)) == 1
    assert list_results(ResultsConfig(folder=folder, out=out)) == 0
    assert list_results(ResultsConfig(folder=folder, out=out, check=True)) == 0
    assert capsys.readouterr().out == f"{out} is not current\nresults: {out}\n{out} is current\n"
    with pytest.raises(UsageError, match=r"^cannot write to --out .*: File exists$"):
        list_results(ResultsConfig(folder=folder, out=out / "results.md"))
    (folder / "one" / "sweep.json").write_text("{")
    with pytest.raises(DataError, match=r"one/sweep.json is not JSON: "):
        list_results(ResultsConfig(folder=folder, out=out))
    (folder / "one" / "sweep.json").write_text(json.dumps({**SWEEP, "rows": [{}]}))
    with pytest.raises(DataError, match=r"one/sweep.json breaks the schema of its kind: .* - at `\$.rows\[0\]`"):
        list_results(ResultsConfig(folder=folder, out=out))


def test_nothing_committed_yet(tmp_path: Path) -> None:
    assert "No results are committed yet." in to_markdown(tmp_path / "benchmarks" / "results", tmp_path / "docs")


def test_every_committed_file_is_listed_with_a_verdict() -> None:
    results = ROOT / "benchmarks" / "results"
    text = to_markdown(results, ROOT / "out")
    for path in results.rglob("*.json"):
        assert f"(../{path.relative_to(ROOT)})" in text
    assert "has no words for" not in text


def test_the_list_makes_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.md"
    assert list_results(ResultsConfig(out=out)) == 0
    assert out.read_text().startswith("# Committed results")
