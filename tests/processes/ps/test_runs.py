"""The parameter-server commands as real processes: whole trainings."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from common.tensors.arena import sha256_of_parameters
from tests.support.commands import JOB, Started, can_listen, end_all, until
from tests.support.groups import free_port
from tests.support.traces import check_causes, check_trace, read_trace

pytestmark = pytest.mark.processes


@dataclass
class Run:
    folder: Path
    launcher: Started
    record: dict[str, Any]


@pytest.fixture(scope="module")
def ps_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("ps-run")
    flags = ["--json", folder / "record.json", "--save", folder / "model.pdparams", "--log-dir", folder / "logs"]
    flags += ["--trace", folder / "trace.json"]
    launcher = Started(folder, "ps.run", "--trainers", 2, "--servers", 2, "--steps", 3, *JOB, *flags)
    try:
        launcher.ended_well()
        yield Run(folder, launcher, json.loads((folder / "record.json").read_text()))
    finally:
        end_all([launcher])


def test_a_run_writes_its_record(ps_run: Run) -> None:
    expected = {
        "scheme": "ps",
        "backend": "shm",
        "nranks": 2,
        "servers": 2,
        "model": "mlp:8",
        "dataset": "synthetic",
        "batch_size": 4,
        "optimizer": "adam",
        "steps": 3,
    }
    assert {key: ps_run.record[key] for key in expected} == expected
    assert 0 <= ps_run.record["accuracy"] <= 1
    assert len(ps_run.record["curve"]) == 3
    assert ps_run.record["samples_per_s"] > 0


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        (["--mode", "ssp", "--staleness", 0], "ssp:0"),
        pytest.param(["--mode", "async"], "async", marks=pytest.mark.long),
        (["--mode", "geo", "--local-steps", 2, "--data-plane", "grpc"], "geo:2"),
    ],
)
def test_a_run_in_another_mode(
    flags: list[object], mode: str, ps_run: Run, start: Callable[..., Started], tmp_path: Path
) -> None:
    file = tmp_path / "record.json"
    run = start("ps.run", "--trainers", 2, "--servers", 2, "--steps", 3, *JOB, *flags, "--json", file)
    run.ended_well()
    record = json.loads(file.read_text())
    assert (ps_run.record["mode"], record["mode"], record["steps"]) == ("sync", mode, 3)
    assert f"2 servers, mode {mode}\n" in run.out
    assert (record["parameters_sha256"] == ps_run.record["parameters_sha256"]) == (mode == "ssp:0")


def test_a_run_saves_the_parameters_of_its_digest(ps_run: Run) -> None:
    state = paddle.load(str(ps_run.folder / "model.pdparams"))
    named = [(name, np.asarray(value)) for name, value in state.items()]
    assert sum(value.size for _, value in named) == 784 * 8 + 8 + 8 * 10 + 10
    assert sha256_of_parameters(named) == ps_run.record["parameters_sha256"]


def test_a_run_keeps_a_log_of_every_process(ps_run: Run) -> None:
    logs = {path.name: path.read_text() for path in (ps_run.folder / "logs").iterdir()}
    assert sorted(logs) == ["serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"]
    for index in (0, 1):
        assert f"server {index}/2 listens on 127.0.0.1:" in logs[f"serverlog.{index}"]
        assert "training is complete: 3 steps" in logs[f"serverlog.{index}"]
    assert ps_run.record["parameters_sha256"] in logs["workerlog.0"]
    assert f"logs of 4 processes: {ps_run.folder / 'logs'}" in ps_run.launcher.out.splitlines()
    assert logs["workerlog.0"] in ps_run.launcher.out  # the terminal shows it, too


def test_a_run_leaves_a_trace_of_all(ps_run: Run) -> None:
    check(ps_run.folder / "trace.json", servers=2)
    words = f"trace: {ps_run.folder / 'trace.json'} (open it at ui.perfetto.dev)"
    assert words in ps_run.launcher.out.splitlines()


def check(file: Path, *, servers: int, ahead_ms: float = 0.0) -> None:
    """The trace of a training of three steps on two ranks, of which all but rank 0 have a clock that is ahead."""
    trace, phases = read_trace(file), frozenset({"input", "forward", "backward"})
    check_trace(trace, nranks=2, servers=servers, steps=range(3), buckets=1, phases=phases)
    (first, *clocks), worst = trace["otherData"]["clocks"], 0.0
    assert (set(first["offset_ms"]), len(clocks)) == ({0.0}, 1 + servers)
    for clock in clocks:
        for offset, uncertainty in zip(clock["offset_ms"], clock["uncertainty_ms"], strict=True):
            assert abs(offset - ahead_ms) <= uncertainty + 1e-3
            worst = max(worst, uncertainty)
    check_causes(trace, nranks=2, steps=range(3), buckets=1, slack_us=2e3 * worst + 0.01)


def another_clock(seconds: int) -> list[str]:
    """What to start a process through, so that its monotonic clock is ahead; nothing where that is not allowed."""
    through = ["unshare", "--time", "--monotonic", str(seconds), "--fork", "--kill-child"]
    try:
        allowed = subprocess.run([*through, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return []
    return through if allowed else []


def test_processes_started_by_hand_in_any_order_give_the_ring_s_bits(
    ps_run: Run, start: Callable[..., Started], tmp_path: Path
) -> None:
    port = free_port()
    trace = tmp_path / "trace.json"
    trainer = ["ps.trainer", *JOB, "--steps", 3, "--servers", f"127.0.0.1:{port}", "--trace", trace, "--rank"]
    elsewhere = another_clock(3600)
    last = start(*trainer, 1, through=elsewhere)
    server = start("ps.server", "--port", port, "--trainers", 2, through=elsewhere)
    until(lambda: f"listens on 127.0.0.1:{port} for 2 trainer(s)" in server.out, "the server")
    first = start(*trainer, 0, "--json", tmp_path / "by-hand.json")
    for one in (last, first, server):
        one.ended_well()
    assert json.loads((tmp_path / "by-hand.json").read_text())["parameters_sha256"] == digest_of_ring(start, tmp_path)
    assert ps_run.record["parameters_sha256"] in first.out
    assert last.out == ""
    assert "training is complete: 3 steps" in server.out
    assert can_listen(port)
    check(trace, servers=1, ahead_ms=3.6e6 if elsewhere else 0.0)


def test_two_launchers_share_the_servers_of_the_first(
    ps_run: Run, start: Callable[..., Started], tmp_path: Path
) -> None:
    hosts = ["--ips", "127.0.0.1,127.0.0.2", "--master", f"127.0.0.1:{free_port()}", "--nranks", 2, "--servers", 2]
    trace = tmp_path / "trace.json"
    command = ["ps.run", *JOB, "--steps", 3, *hosts, "--trace", trace, "--node-rank"]
    second = start(*command, 1, "--log-dir", tmp_path / "second")
    first = start(*command, 0, "--log-dir", tmp_path / "first")
    for launcher in (second, first):
        launcher.ended_well()
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == ["workerlog.1"]
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == ["serverlog.0", "serverlog.1", "workerlog.0"]
    assert ps_run.record["parameters_sha256"] in (tmp_path / "first" / "workerlog.0").read_text()
    check(trace, servers=2)


def digest_of_ring(start: Callable[..., Started], folder: Path) -> str:
    start("collective.run", "--nranks", 2, "--steps", 3, *JOB, "--json", folder / "ring.json").ended_well()
    return str(json.loads((folder / "ring.json").read_text())["parameters_sha256"])
