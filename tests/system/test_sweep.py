"""Whole sweeps as real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.typed_results import load


def sweep(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, "-m", "benchmarks", "sweep", "--out", str(folder), *flags],
        env={**os.environ, **environment},
        timeout=110,
    )


@pytest.mark.processes
def test_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paddle")
    monkeypatch.setenv(warm.COLD_VARIABLE, "1")  # a fork would not read sitecustomize
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['mpi4py'] = None")
    backends = "shm,shm-copied,tcp,gloo,mpi,memory-limit,loopback-limit"
    small = ["--sizes", "4KiB,100KiB", "--repetitions", "2", "--seconds", "0.005", "--late", "0.3"]
    history = tmp_path / "history"
    flags = ["--backends", backends, "--nranks", "3", "--history", str(history), *small]
    done = sweep(tmp_path, *flags, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (kept,) = history.iterdir()
    assert "-sweep-" in kept.name
    assert kept.read_text() == (tmp_path / "sweep.json").read_text()
    found = json.loads((tmp_path / "sweep.json").read_text())
    rows, waiting = found["rows"], found["waiting"]
    assert len(rows) == 2 * 6
    assert len(waiting) == 4
    assert all(0 <= row["core"] < 0.5 for row in waiting if row["backend"] in ("shm", "tcp"))
    assert (
        done.stdout.count("Largest share of a core that a rank uses while it waits for one that is 0.3 s late: shm ")
        == 1
    )
    assert all(row["wrong"] == 0 and row["time_ms"] > 0 for row in rows)
    assert {row["backend"] for row in rows if row["of_limit"]} == {"shm", "shm-copied", "tcp"}
    assert "N=3" in done.stdout
    text, page = ((tmp_path / name).read_text() for name in ("sweep.md", "sweep.html"))
    assert "| 100 KiB | tcp |" in text
    why = "mpi4py is not installed (pip install mpi4py)"
    assert f"absent: mpi: {why}\n" in done.stdout
    assert all(f"mpi is absent: {why}." in told for told in (text.replace("\\", ""), page))


@pytest.mark.processes
@pytest.mark.long
def test_rounds_of_parameter_servers(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    small = ["--sizes", "100KiB,40KiB", "--repetitions", "2", "--seconds", "0.005", "--nranks", "2", "--servers", "2"]
    backends = "ps-shm,ps-shm-copied,ps-grpc,round-limit,memcpy"
    done = sweep(tmp_path, "--op", "push_pull", "--lang", "zh", "--backends", backends, *small)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert len(rows) == 2 * 5
    assert all(row["wrong"] == 0 and row["time_ms"] > 0 for row in rows)
    assert {row["backend"] for row in rows if row["of_limit"]} == {"ps-shm", "ps-shm-copied", "ps-grpc"}
    memory = {row["backend"]: row["server_memory"] for row in rows if "server_memory" in row}
    assert memory.keys() == {"ps-shm", "ps-shm-copied", "ps-grpc"}
    assert all(0 < each["own"] < each["limit"] for each in memory.values())
    assert memory["ps-grpc"]["limit"] == pytest.approx(100 + 3 * 0.1024 / 2)
    assert (tmp_path / "sweep.md").read_text().startswith("# GradSync: push\\_pull，参数服务器的一轮（float32，SGD）")


@pytest.mark.long
@pytest.mark.processes
def test_a_broadcast(tmp_path: Path) -> None:
    backends = "shm,tcp,memory-limit,loopback-limit"
    small = ["--nranks", "3", "--sizes", "4KiB,100KiB", "--repetitions", "1", "--seconds", "0.005"]
    done = sweep(tmp_path, "--op", "broadcast", "--backends", backends, *small)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["backend"] for row in rows] == backends.split(",") * 2
    assert all(row["wrong"] == 0 and row["time_ms"] > 0 and row["busbw_gb_s"] == row["algbw_gb_s"] for row in rows)
    assert {row["backend"] for row in rows if row["of_limit"]} == {"shm", "tcp"}
    assert (tmp_path / "sweep.md").read_text().startswith("# GradSync: broadcast of float32 from rank 0\n")


@pytest.mark.processes
@pytest.mark.parametrize(("op", "plain"), [("all_reduce", ["tcp"]), ("push_pull", ["ps-tcp", "ps-grpc"])])
@pytest.mark.long
def test_the_same_over_tls(op: str, plain: list[str], tmp_path: Path) -> None:
    small = ["--nranks", "2", "--sizes", "100KiB", "--repetitions", "1", "--seconds", "0.005", "--late", "0"]
    done = sweep(tmp_path, "--tls", "--op", op, "--backends", ",".join(plain), *small)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["backend"] for row in rows] == [each for name in plain for each in (name, f"{name}-tls")]
    assert all(row["wrong"] == 0 and row["time_ms"] > 0 for row in rows)
    assert "N=2, TLS takes so many times as long as plain text: " in done.stdout


@pytest.mark.processes
def test_what_a_sweep_has_measured_before_ctrl_c_is_kept(tmp_path: Path, interrupted_when: Callable[..., Any]) -> None:
    out, history = tmp_path / "out", tmp_path / "history"
    flags = ["--nranks", "2", "--sizes", "4KiB", "--backends", "shm,memory-limit", "--repetitions", "100000"]
    command = ["sweep", *flags, "--seconds", "0.001", "--out", str(out), "--history", str(history)]
    done = interrupted_when(command, lambda doing: "round " in doing and "round 1 " not in doing)
    assert (done.returncode, done.stderr) == (130, "")
    found = load(out / "sweep.json")
    assert found["interrupted"]
    assert [row["backend"] for row in found["rows"]] == ["shm", "memory-limit"]
    assert "- Interrupted: only a part of what was asked for was measured." in (out / "sweep.md").read_text()
    assert "N=2" in done.stdout
    assert not history.exists() or not [*history.iterdir()]
