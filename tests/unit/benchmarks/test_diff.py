"""`python -m benchmarks diff`: faster, slower, within noise; files that hold no results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records.result_files import check_history, write_results
from benchmarks.stats.agreement import Figure
from benchmarks.verbs.diff import Change, DiffConfig, changes, check_alike, diff, figures, job_of, load, remarks
from common.errors import DataError, GradSyncError, UsageError
from tests.support import warm
from tests.support.typed_results import completed, typed

CLUSTER = {
    "words": "4 hosts, 1gbit",
    "hosts": 4,
    "links_bytes_per_s": [125e6] * 4,
    "delay_s": 0.0,
    "cores_per_host": None,
    "congestion_control": "cubic",
}
MACHINE = {"cpu": "Some CPU", "cores": 2}
TOP = {"environment": MACHINE}


def row(backend: str, time: float, low: float, high: float, **more: Any) -> dict[str, Any]:
    return {
        "backend": backend,
        "nranks": 4,
        "bytes": 10**8,
        "time_ms": time,
        "time_ms_interval": [low, high],
        "wrong": 0,
        **more,
    }


def sweep(*rows: dict[str, Any]) -> dict[str, Any]:
    return completed({**TOP, "op": "all_reduce", "rows": list(rows)}, "sweep")


def compare(*rates: tuple[str, float, float, float], model: str = "mlp") -> dict[str, Any]:
    job: dict[str, Any] = {"model": model, "dataset": "digits", "batch_size": 32, "optimizer": "adam"}
    job |= {"scheme": "ps", "nranks": 2}
    runs = [{**job, "contestant": c, "samples_per_s": s, "samples_per_s_interval": [a, b]} for c, s, a, b in rates]
    certificate = {"identical": bool(runs), "steps": 5, "schemes": {}, "groups": [], "differences": []}
    return completed({**TOP, "certificate": certificate, "runs": runs}, "compare")


@pytest.mark.parametrize(
    ("after", "verdict", "factor"),
    [
        ((20, 18, 22), "slower", "2.00x slower"),
        ((11, 10.5, 12), "within noise", "1.10x slower"),
        ((5, 4, 8.9), "faster", "2.00x faster"),
        ((5, 4, 9), "within noise", "2.00x faster"),
        ((20, 20, 20), "noise unknown", "2.00x slower"),
    ],
)
def test_verdicts(after: tuple[float, float, float], verdict: str, factor: str) -> None:
    change = Change("x", Figure(10, 9, 11), Figure(*after))
    assert (change.verdict, change.factor) == (verdict, factor)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"cores": 4}, ["different machines or settings: Some CPU, 2 cores / Some CPU, 4 cores"]),
        (
            {"mkl_cpu_type": "5"},
            ["different machines or settings: Some CPU, 2 cores / Some CPU, 2 cores, MKL_DEBUG_CPU_TYPE=5"],
        ),
    ],
)
def test_two_machines_are_told(change: dict[str, Any], told: list[str]) -> None:
    before, after = sweep(), sweep()
    after["environment"] = {**MACHINE, **change}
    assert remarks(typed(before), typed(after), []) == told


def test_figures_of_each_kind() -> None:
    found = figures(typed(sweep(row("tcp", 10, 9, 11), row("gloo", 5, 4, 6), row("link", 5, 4, 6))))
    race = "N=4 100 MB"
    assert found == {
        "tcp N=4 100 MB": Figure(10, 9, 11, race=race),
        "gloo N=4 100 MB": Figure(5, 4, 6, ours=False, race=race),
        "link N=4 100 MB": Figure(5, 4, 6, ours=False, race=race),
    }
    assert figures(typed(compare(("ps N=2", 1000, 500, 2000)))) == {"ps N=2": Figure(1000, 500, 2000, race="N=2")}
    run = {"contestant": "ps N=2", "nranks": 2, "scheme": "ps", "step_ms": 7, "step_ms_interval": [6, 8]}
    assert figures(typed({**TOP, "runs": [run]}, "script")) == {"ps N=2": Figure(7, 6, 8, race="N=2")}


def accuracy(*seconds: float | None, target: float = 0.97) -> dict[str, Any]:
    run = {"contestant": "ps/shm N=2 async", "scheme": "ps", "mode": "async", "straggler": "permanent"}
    run |= {"seed": 1, "samples_per_s": 90.0, "seconds": 9.0, "accuracy": 0.98, "points": []}
    job = {"target": target, "factor": 3.0, "nranks": 2, "seeds": [1, 2, 3], "model": "mlp", "dataset": "digits"}
    job |= {"batch_size": 32, "optimizer": "sgd", "lr": 0.1, "steps": 60, "eval_every": 10}
    certificate = {"passed": True, "contestants": [], "sha256": {}}
    runs = [{**run, "target_s": each} for each in seconds]
    return completed({**TOP, "job": job, "certificate": certificate, "runs": runs}, "accuracy")


def test_of_accuracy_the_time_to_the_target_counts_where_every_seed_reached_it() -> None:
    expected = Figure(3000, 2000, 4000, race="rank 1 slowed 3x")
    assert figures(typed(accuracy(2.0, 4.0, 3.0))) == {"ps/shm async, rank 1 slowed 3x": expected}
    assert figures(typed(accuracy(2.0, None, 3.0))) == {}


def test_with_strong_scaling_one_job_is_one_batch_of_all_ranks() -> None:
    whole = {**compare(("ps N=2", 2, 1, 3), ("ps N=4", 2, 1, 3)), "scaling": "strong"}
    for run, nranks in zip(whole["runs"], (2, 4), strict=True):
        run.update(nranks=nranks, batch_size=64 // nranks)
    assert job_of(typed(whole)) == "model mlp, dataset digits, batch_size 64, optimizer adam; strong scaling"
    assert job_of(typed({**whole, "runs": whole["runs"][:1]})) == job_of(typed(whole))


def test_only_what_both_have_is_compared() -> None:
    one = Figure(1, 1, 1)
    assert changes({"a": one, "b": one}, {"b": one, "c": one}) == [Change("b", one, one)]


def crossover(ring: tuple[float, float, float], ps: tuple[float, float, float]) -> dict[str, Any]:
    sides = {
        name: {"time_ms": time, "time_ms_interval": [low, high], "bound_ms": 1.0, "of_bound": 1 / time}
        for name, (time, low, high) in (("ring", ring), ("ps", ps))
    }
    place = {"link": "1gbit", "link_bytes_per_s": 125e6, "nranks": 4, "servers": 2, "bytes": 10**6}
    stream = {"stream_bytes_per_s": 1e8, "stream_bytes_per_s_interval": [0.5e8, 2e8]}
    cell = {**place, **stream, **sides, "ratio": ring[0] / ps[0]}
    return completed({**TOP, "congestion_control": "cubic", "repetitions": 3, "cells": [cell]}, "crossover")


def test_figures_of_a_crossover_map() -> None:
    assert figures(typed(crossover((10, 9, 11), (5, 4, 6)))) == {
        "ring N=4 1gbit 1 MB": Figure(10, 9, 11, race="N=4 1gbit 1 MB"),
        "ps N=4 S=2 1gbit 1 MB": Figure(5, 4, 6, race="N=4 1gbit 1 MB"),
        "plain stream N=4 1gbit 1 MB": Figure(10, 5, 20, ours=False),
    }


def test_servers_apart_are_not_taken_for_those_beside_the_ranks() -> None:
    both = crossover((10, 9, 11), (5, 4, 6))
    both["cells"].append({**both["cells"][0], "apart": True, "ps": {**both["cells"][0]["ps"], "time_ms": 5.5}})
    times = {name: each.time for name, each in figures(typed(both)).items() if name.startswith("ps")}
    assert times == {"ps N=4 S=2 1gbit 1 MB": 5, "ps N=4 S=2+ 1gbit 1 MB": 5.5}


def test_two_crossover_maps(write: Callable[[str, Any], str], capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(write("a", crossover((10, 9, 11), (5000, 4000, 6000))))
    after = Path(write("b", crossover((10, 9, 11), (8000, 7000, 9000))))
    assert diff(DiffConfig(before=before, after=after)) == 1
    out = capsys.readouterr().out
    assert "ps N=4 S=2 1gbit 1 MB" in " ".join(out.split())
    assert "5,000 4,000-6,000" in " ".join(out.split())
    assert out.endswith("1 slower, 1 within noise\n")
    assert diff(DiffConfig(before=after, after=before)) == 0


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Any], str]:
    def to(name: str, content: Any) -> str:
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return str(tmp_path / name)

    return to


def run(*files: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "diff", *files]
    return warm.run(command, timeout=60)


@pytest.mark.processes
def test_a_regression_is_exit_code_1_and_other_changes_are_0(write: Callable[[str, Any], str]) -> None:
    limit = row("memory-limit", 5, 4, 6)
    before = write("a", sweep(row("tcp", 10, 9, 11), row("shm", 10, 9, 11), row("gloo", 10, 9, 11), limit))
    slow_limit = row("memory-limit", 50, 40, 60)
    after = write("b", sweep(row("tcp", 20, 19, 22), row("shm", 5, 4, 6), row("mpi", 1, 1, 2), slow_limit))
    done = run(before, after)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "not ours: memory-limit N=4 100 MB is 10.00x slower"
    assert lines[1:3] == ["only before: gloo N=4 100 MB", "only after: mpi N=4 100 MB"]
    assert lines[4].split() == ["tcp", "N=4", "100", "MB", "10", "9-11", "20", "19-22", "2.00x", "slower"]
    assert lines[5].split()[0] == "shm"
    assert lines[-1] == "1 slower, 1 faster"
    assert run(before, before).returncode == 0
    agreed = "8 of 8 medians (100%) lie in the other run's interval; 0 of 6 pairs have another winner\n"
    assert run(before, before).stdout == agreed + "2 within noise\n"
    assert run(write("c", sweep(row("tcp", 20, 19, 22), slow_limit)), before).returncode == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (sweep(), compare(("ps", 1, 1, 1)), "one is of sweep, the other of compare; give two of a kind"),
        (
            compare(("ps", 1, 1, 1)),
            compare(("ps", 1, 1, 1), model="cnn"),
            "they measured different things: model mlp, dataset digits, batch_size 32, optimizer adam / model cnn",
        ),
        (
            compare(("ps", 1, 1, 1)),
            {**compare(("ps", 1, 1, 1)), "scaling": "strong"},
            "batch_size 32, optimizer adam / model mlp, dataset digits, batch_size 64, optimizer adam; strong scaling",
        ),
        (
            accuracy(1.0),
            accuracy(1.0, target=0.9),
            "optimizer sgd, lr 0.1, nranks 2, steps 60, target 0.97, eval_every 10, factor 3.0 / model mlp",
        ),
        (
            sweep(),
            {**sweep(), "cluster": CLUSTER},
            "different things: all_reduce / all_reduce; on 4 hosts, 1gbit",
        ),
        (sweep(), {**sweep(), "op": "broadcast"}, "they measured different things: all_reduce / broadcast"),
        (
            {**sweep(), "op": "push_pull", "servers": 1},
            {**sweep(), "op": "push_pull", "servers": 4},
            "they measured different things: push_pull; servers 1 / push_pull; servers 4",
        ),
    ],
)
def test_results_that_cannot_be_compared(before: Any, after: Any, text: str, write: Callable[[str, Any], str]) -> None:
    done = run(write("a", before), write("b", after))
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_two_programs_are_not_compared() -> None:
    one, other = (typed({"program": name}, "script") for name in ("train.py", "other.py"))
    check_alike(one, one)
    with pytest.raises(UsageError, match=r"^they measured different things: program train.py / program other.py$"):
        check_alike(one, other)


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        ("{", DataError, "is not JSON: "),
        ([1], DataError, "holds no results of python -m benchmarks"),
        ({"schema": 1}, DataError, "holds no results of python -m benchmarks"),
        (
            {**sweep(), "schema": 2},
            DataError,
            "has schema 2, this version reads 1; use the one that wrote it",
        ),
        (sweep(row("tcp", -1, 1, 1)), DataError, "breaks the schema of its kind: Expected `float` > 0"),
        (
            sweep(row("tcp", 1, 1, 1, wrong=3)),
            GradSyncError,
            "wrong sums from tcp N=4, so there is no speed to compare",
        ),
        (compare(), GradSyncError, "the certificate failed, so there is no speed to compare"),
    ],
)
def test_files_without_results(
    content: Any, kind: type[Exception], text: str, write: Callable[[str, Any], str]
) -> None:
    with pytest.raises(kind) as caught:
        load(Path(write("x.json", content)))
    assert text in str(caught.value)
    assert "x.json" in str(caught.value)


def test_runs_of_a_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = tmp_path / "history"
    check_history(history)
    for day, time in ((2, 20), (1, 10)):
        results = {**sweep(row("tcp", time, time - 1, time + 1)), "created": f"2026-01-0{day}T00:00:00+00:00"}
        write_results(typed(results), tmp_path / "sweep.json", history)
    first, last = sorted(history.iterdir())  # the names begin with the time
    assert diff(DiffConfig(before=first, after=last)) == 1
    assert "2.00x slower" in capsys.readouterr().out
    with pytest.raises(DataError) as caught:
        diff(DiffConfig(before=history, after=last))
    assert str(caught.value) == f"{history} is a folder; give one of its files, the latest is {last.name}"
    with pytest.raises(DataError, match=r"is a folder; give one of its files$"):
        load(tmp_path / "history" / "..")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*/nothing.json: No such file or directory"):
        load(tmp_path / "nothing.json")


def test_two_jobs_part_by_part(write: Callable[[str, Any], str], capsys: pytest.CaptureFixture[str]) -> None:
    def job(*parts: tuple[str, str, Any]) -> dict[str, Any]:
        return completed({"parts": [dict(zip(("name", "status", "results"), p, strict=True)) for p in parts]}, "suite")

    def rows(shm: float, tcp: float, wait: float) -> dict[str, Any]:
        return sweep(row("shm", shm, shm - 1, shm + 1), row("tcp", tcp, tcp - 1, tcp + 1), row("mpi", wait, wait, wait))

    before = write("a", job(("sums", "done", rows(10, 20, 5)), ("cnn", "failed", None)))
    after = write("b", job(("sums", "done", rows(20.5, 17, 5)), ("cnn", "done", compare(("ps", 9, 8, 10)))))
    assert diff(DiffConfig(before=Path(before), after=Path(after))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "only after: cnn: ps"
    assert lines[-3:] == [
        "0 of 4 medians (0%) lie in the other run's interval; 1 of 1 pairs have another winner",
        "another winner: sums: shm N=4 100 MB / sums: tcp N=4 100 MB",
        "1 slower, 1 faster",
    ]
    assert diff(DiffConfig(before=Path(before), after=Path(before))) == 0
    other = write("c", job(("sums", "done", {**rows(2, 3, 4), "op": "broadcast"})))
    with pytest.raises(UsageError, match="they measured different things: all_reduce / broadcast"):
        diff(DiffConfig(before=Path(before), after=Path(other)))
