"""`python -m benchmarks compare`, small but real."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contestants.table_of_trainings import RIVALS, Contestant
from benchmarks.netlab.cluster import why_no_cluster
from benchmarks.training.measure import Records
from benchmarks.verbs.compare import keep_whole_rounds
from tests.support import warm
from tests.support.groups import LEAST_OF_LINK
from tests.support.traces import check_causes, check_trace, read_trace
from tests.support.typed_results import load, rank_record

pytest.importorskip("paddle")
pytestmark = pytest.mark.processes

TORCH = importlib.util.find_spec("torch") is not None
TINY = ["--model", "mlp:16", "--steps", "4", "--warmup-steps", "1", "--repetitions", "1", "--batch-size", "8"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-m", "benchmarks", *flags], timeout=110)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("compare")
    schemes = ["--schemes", "local,ps,ring,paddle,torch-ddp", "--nranks", "1,3", "--ps-modes", "sync,ssp:0,geo:2"]
    schemes += ["--shard-optimizer"]
    folders = ["--out", str(out), "--history", str(out / "history"), "--trace", str(out / "traces")]
    return run("compare", *TINY, *schemes, *folders, "--lang", "zh"), out


@pytest.fixture
def results(finished: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((finished[1] / "results.json").read_text())
    return found


def test_it_ends_well_and_prints_the_path_last(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, out = finished
    assert done.returncode == 0, done.stderr
    certificate = "Certificate: the parameters after 5 steps"
    absent = "absent: torch-ddp: PyTorch is not installed (pip install torch)\n"
    assert done.stdout.startswith(certificate if TORCH else absent + certificate)
    assert (out / "report.md").read_text().startswith("# GradSync：参数服务器与环形 all-reduce 的比较")
    assert done.stdout.rstrip().endswith(str(out / "report.html"))
    assert {p.name for p in out.iterdir()} == {"results.json", "report.md", "report.html", "history", "traces"}
    (kept,) = (out / "history").iterdir()
    assert "-compare-" in kept.name
    assert load(kept) == json.loads((out / "results.json").read_text())


def test_every_contestant_leaves_a_trace(
    finished: tuple[subprocess.CompletedProcess[str], Path], results: dict[str, Any]
) -> None:
    names = {r["contestant"].replace("/", "-").replace(" ", "_") for r in results["runs"] if r["scheme"] not in RIVALS}
    traces = {path.stem: read_trace(path) for path in (finished[1] / "traces").iterdir()}
    assert traces.keys() == names
    for name, trace in traces.items():
        assert trace["otherData"]["missing"] == []
        if "N=3" in name and "geo" not in name:
            servers = 0 if "ring" in name else 2 if "S=2" in name else 1
            check_trace(trace, nranks=3, servers=servers, steps=range(4), buckets=1)
    check_causes(traces["ps-tcp_N=3"], nranks=3, steps=range(4), buckets=1)


def test_everyone_computed_the_same(results: dict[str, Any]) -> None:
    certificate = results["certificate"]
    assert certificate["identical"]
    assert certificate["passed"]
    assert len(certificate["schemes"]) == 13 + 2 * TORCH
    assert len({certificate["schemes"][n] for n in ("local N=1", "ps/shm N=1", "ring/shm N=1")}) == 1
    others = ("geo", "paddle", "torch")
    in_step = {v for n, v in certificate["schemes"].items() if "N=3" in n and not any(other in n for other in others)}
    assert len(in_step) == 1
    peers = {peer["contestant"]: peer for peer in certificate["peers"]}
    assert list(peers) == [f"{peer} N={n}" for n in (1, 3) for peer in ("paddle", *["torch-ddp"] * TORCH)]
    assert certificate["schemes"]["paddle N=1"] == certificate["schemes"]["local N=1"]
    assert all(0 < peer["difference"] < 1e-5 for name, peer in peers.items() if "N=3" in name)
    assert "ps/shm N=3 ssp:0" in certificate["groups"][1]["contestants"]
    assert certificate["other_order"] == ["ps/shm N=3 geo:2"]
    assert certificate["groups"][1]["whole_batch"]["within"]


def test_who_is_absent_is_told_with_the_reason(
    finished: tuple[subprocess.CompletedProcess[str], Path], results: dict[str, Any]
) -> None:
    absent = {} if TORCH else {"torch-ddp": "PyTorch is not installed (pip install torch)"}
    assert results["missing"] == absent
    told = "torch-ddp 未参测：没有安装 PyTorch（pip install torch）。" in (finished[1] / "report.md").read_text()
    assert told == (not TORCH)


def test_every_run_is_whole(results: dict[str, Any]) -> None:
    assert [r["contestant"] for r in results["runs"]] == list(results["certificate"]["schemes"])
    for run_record in results["runs"]:
        assert run_record["steps"] == 4
        assert run_record["samples_per_s"] > 0
        assert run_record["step_ms"]["p99"] >= run_record["step_ms"]["p50"] > 0
        assert len(run_record["curve"]) == 4
        assert 0 <= run_record["accuracy"] <= 1
        assert len(run_record["parameters_sha256"]) == 64


def test_the_environment_is_told(results: dict[str, Any]) -> None:
    environment = results["environment"]
    assert environment["cores"] >= 1
    assert environment["memcpy_gb_per_s"] > 0
    assert environment["versions"]["paddlepaddle"]
    assert results["command"].startswith("python -m benchmarks compare --model mlp:16")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["compair"], "unknown verb 'compair'; did you mean 'compare'"),
        (["compare", "--schemes", "ps,rnig"], "unknown scheme 'rnig'; did you mean 'ring'"),
        (["compare", "--nranks", "two"], "--nranks must be numbers"),
        (["compare", "--schemes", "local", "--nranks", "2"], "nobody takes part"),
        (["compare", "--steps", "2", "--warmup-steps", "2"], "--steps more than --warmup-steps"),
        (["compare", "--backends", "shmem"], "did you mean 'shm'"),
        (["compare", "--hosts", "2", "--backends", "shm"], "shm does not reach other hosts"),
        (["compare", "--latency", "1ms"], "--latency is for emulated hosts; give --hosts too"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags: list[str], text: str) -> None:
    done = run(*flags)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_was_measured_before_ctrl_c_is_kept(tmp_path: Path, interrupted_when: Callable[..., Any]) -> None:
    flags = ["--schemes", "local,ring", "--nranks", "1", "--repetitions", "1000", "--out", str(tmp_path / "out")]
    command = ["compare", *TINY, *flags, "--history", str(tmp_path / "history")]
    done = interrupted_when(command, lambda doing: "round 3 of 1000" in doing)
    assert (done.returncode, done.stderr) == (130, "")
    found = load(tmp_path / "out" / "results.json")
    assert found["interrupted"]
    counts = {run["contestant"]: run["repetitions"] for run in found["runs"]}
    assert counts.keys() == {"local N=1", "ring/shm N=1"}
    assert len({*counts.values()}) == 1
    assert min(counts.values()) >= 2
    cut = "Interrupted: only a part of what was asked for was measured."
    assert cut in done.stdout
    assert f"- {cut}" in (tmp_path / "out" / "report.md").read_text()
    assert not (tmp_path / "history").exists() or not [*(tmp_path / "history").iterdir()]


def test_before_the_first_round_is_made_there_is_nothing_to_keep() -> None:
    one, other = Contestant("local", "none", 1), Contestant("ring", "shm", 1)
    record = rank_record()
    assert not keep_whole_rounds({one: [record]}, [one, other])
    records: Records = {one: [record] * 3, other: [record] * 2}
    assert keep_whole_rounds(records, [one, other])
    assert [len(mine) for mine in records.values()] == [2, 2]


def test_missing_data_is_named(tmp_path: Path) -> None:
    done = run("compare", *TINY, "--dataset", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert f"no such file: {tmp_path}/train-images-idx3-ubyte.gz" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "-")
def test_between_emulated_hosts(tmp_path: Path) -> None:
    cluster = ["--hosts", "3", "--link", "200mbit", "--nranks", "1,2", "--servers", "1,2"]
    done = run("compare", *TINY, *cluster, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["certificate"]["passed"]
    assert LEAST_OF_LINK < found["cluster"]["stream_bytes_per_s"] / 25e6 < 1.0
    least = {r["contestant"]: r["least_sync_ms"] for r in found["runs"]}
    size = {r["parameter_bytes"] for r in found["runs"]}
    assert size == {4 * (784 * 16 + 16 + 16 * 10 + 10)}
    share = 1e3 * size.pop() / found["cluster"]["stream_bytes_per_s"]  # M/B in ms
    alone = {"local N=1": 0, "ps/tcp N=1": share, "ring/tcp N=1": 0}
    pairs = {
        "ps/tcp N=2": 2 * share,
        "ps/tcp N=2 S=2": share,
        "ring/tcp N=2": share,
    }  # the second server is beside rank 0
    assert least == pytest.approx(alone | pairs)
    assert "Emulated: 3 hosts, 200mbit. A plain TCP stream reaches" in (tmp_path / "report.md").read_text()
