"""What a server tells of its training: by `ps.status`, to Prometheus, to a health check, and at its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from common.errors import PeerLost, PortInUse
from common.network.gradsync_pb2 import StatusReply
from common.system.process import RESTARTS_VARIABLE
from common.tensors.arena import Arena, Layout
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.connection import Connection, connect
from ps.coordinator.metrics import serve_metrics
from ps.coordinator.pace import Pace
from ps.coordinator.servicer import ParameterServer
from ps.planes.methods import SERVICE
from ps.status import table_of
from ps.store.modes import Mode
from tests.support.channels import member_channel
from tests.support.groups import DEADLINE_S, on_threads, outcomes_of

STEPS = 4
POLL_S = 0.005


def averaging(server: ParameterServer, plane: str, seen: Callable[[Connection, int], Any]) -> list[Any]:
    """Two trainers average 1,000 words STEPS times; rank 1 comes last. What `seen` found at the ends of steps."""

    def body(rank: int) -> list[Any]:
        found = []
        with connect([server.address], rank, 2, plane) as connection:
            connection.register(np.zeros(1000, np.float32))
            for step in range(STEPS):
                connection.push(np.zeros(1000, np.float32))
                if rank:
                    wait_for_commit(server, step)
                connection.pull(np.empty(1000, np.float32))
                found.append(seen(connection, step))
        return found

    return on_threads(2, body)


def wait_for_commit(server: ParameterServer, step: int) -> None:
    """Until rank 0 has committed a step."""
    deadline = time.monotonic() + DEADLINE_S
    while server.status().trainers[0].steps <= step:
        assert time.monotonic() < deadline, f"rank 0 did not commit step {step} within {DEADLINE_S:g} s"
        time.sleep(POLL_S)


@pytest.mark.parametrize(("plane", "served"), [("shm", 0), ("tcp", 4 * 1008), ("grpc", 4 * 1008)])
def test_a_status_has_the_steps_and_bytes_of_every_trainer(plane: str, served: int) -> None:
    with ParameterServer("127.0.0.1:0", 2) as server:
        assert server.status().state == "waiting for trainers"
        averaging(server, plane, lambda connection, step: connection.barrier())
        server.wait()
        status = server.status()
        assert (status.shard, status.shards, status.nranks, status.steps) == (0, 1, 2, STEPS)
        assert (status.state, status.parameters) == ("complete", 1008)
        assert [t.rank for t in status.trainers] == [0, 1]
        for t in status.trainers:
            assert (t.data_plane, t.steps, t.left) == (plane, STEPS, True)
            assert t.bytes_pushed == 4 * 1008 * STEPS
            assert t.bytes_served == served * (STEPS + 1)
        assert [t.times_last for t in status.trainers] == [0, STEPS]
        assert status.trainers[1].lag > status.trainers[0].lag == 0
        assert re.fullmatch(
            r"rank 1 came last in 100% of the steps, \d+\.\d ms after the first \(median\)", server.straggler()
        )


def test_a_status_tells_the_failure() -> None:
    def body(rank: int) -> None:
        with connect([server.address], rank, 2) as connection:
            connection.register(np.zeros(4, np.float32))
            if rank:
                raise ValueError("boom")
            connection.push_pull(np.zeros(4, np.float32))

    with ParameterServer("127.0.0.1:0", 2) as server:
        outcomes_of(2, body)
        assert server.status().state == "rank 1 left at step 0 with ValueError: boom"


# How the trainers keep up


def test_of_one_trainer_nobody_is_last() -> None:
    pace = Pace(1)
    pace.committed(0, 1.0)
    assert pace.straggler() == ""
    assert Pace(2).straggler() == ""


@given(st.lists(st.permutations(range(3)), min_size=1, max_size=20), st.floats(0.001, 10))
def test_lag_is_the_median_behind_the_first(orders: list[list[int]], gap: float) -> None:
    pace, expected = Pace(3), {rank: [] for rank in range(3)}
    for step, order in enumerate(orders):
        for place, rank in enumerate(order):
            pace.committed(rank, 100.0 * step + gap * place)
            expected[rank].append(gap * place)
    for rank in range(3):
        assert pace.lag(rank) == pytest.approx(float(np.median(expected[rank])), abs=1e-6)
        assert pace.times_last[rank] == sum(order[-1] == rank for order in orders)
        assert pace.steps[rank] == len(orders)


def test_steps_of_trainers_that_run_apart_are_compared_by_their_numbers() -> None:
    pace = Pace(2)
    for rank, now in [(0, 1.0), (0, 2.0), (1, 5.0), (0, 5.5), (1, 6.0), (1, 7.0), (1, 8.0), (0, 10.0)]:
        pace.committed(rank, now)
    assert pace.steps == [4, 4]
    assert pace.times_last == [1, 3]  # steps 0, 1 and 2: rank 1, 4, 4 and 1.5 s after rank 0; step 3: rank 0, 2 s
    assert (pace.lag(0), pace.lag(1)) == (0.0, 2.75)
    assert pace.straggler() == "rank 1 came last in 75% of the steps, 2750.0 ms after the first (median)"


def test_in_a_relaxed_mode_too_a_status_tells_who_waits_and_who_is_late() -> None:
    """ssp with staleness 1: rank 0 makes a step, and waits at the end of its second for rank 1's first."""
    pytest.importorskip("paddle")  # in this thread: elsewhere it would leave this one in static mode

    def body(rank: int) -> None:
        with Client([server.address], rank, 2, mode=Mode("ssp", 1)) as client:
            arena = Arena(Layout.of([("w", (4,))]))
            client.register(arena, SGD())
            for step in range(2):
                if rank and not step:
                    wait_for_commit(server, 1)
                    seen.extend(t.waiting for t in server.status().trainers)
                client.push(0)
                client.commit(0.1)

    seen: list[bool] = []
    with ParameterServer("127.0.0.1:0", 2) as server:
        on_threads(2, body)
        server.wait()
        told = server.status()
    assert seen == [True, False]
    assert told.trainers[1].times_last >= 1
    assert told.trainers[1].lag > 0
    assert "rank 1 came last" in server.straggler()


# The table


def status(state: str = "training", **fields: Any) -> StatusReply:
    reply = StatusReply(shards=1, nranks=2, steps=1234, state=state, parameters=25_000_000, **fields)
    reply.trainers.add(rank=0, data_plane="shm", steps=1234, lag=0.0, bytes_pushed=123_400_000_000, times_last=0)
    reply.trainers.add(
        rank=1, data_plane="grpc", steps=1235, lag=0.0123, bytes_served=5_000_000, times_last=617, left=True
    )
    return reply


def rendered(*replies: StatusReply) -> list[str]:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - ends with the console
    console.print(table_of([f"127.0.0.1:{8500 + i}" for i in range(len(replies))], replies))
    console.file.close()
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_table_has_a_line_for_each_server_and_trainer() -> None:
    lines = rendered(status())
    assert lines[0].split() == ["server", "address", "steps", "parameters", "MB", "state"]
    assert lines[1].split() == ["0/1", "127.0.0.1:8500", "1,234", "100.0", "training"]
    heads = ["rank", "data", "steps", "last", "in", "lag", "ms", "behind", "pushed", "MB", "served", "MB"]
    assert lines[3].split() == heads
    assert lines[4].split() == ["0", "shm", "1,234", "0%", "0.0", "1", "123,400.0", "0.0"]
    assert lines[5].split() == ["1", "(left)", "grpc", "1,235", "50%", "12.3", "0", "0.0", "5.0"]


def test_several_models_are_counted() -> None:
    assert rendered(status(models=3))[1].split()[-3:] == ["training,", "3", "models"]
    assert rendered(status(models=1))[1].split()[-1] == "training"


def test_restarts_are_counted() -> None:
    assert rendered(status(restarts=2))[1].split()[-5:] == ["training,", "2", "restarts", "so", "far"]
    assert rendered(status(restarts=1))[1].endswith("training, 1 restart so far")
    assert figures(lambda: status(restarts=2))["gradsync_restarts_total"] == 2


def test_a_server_of_a_later_life_tells_how_often_its_job_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "3")
    with ParameterServer("127.0.0.1:0", 1) as server:
        assert server.status().restarts == 3


def test_trainers_of_several_servers_are_added_up() -> None:
    lines = rendered(status(), status(shard=1))
    assert lines[5].split() == ["0", "shm", "1,234", "0%", "0.0", "1", "246,800.0", "0.0"]
    later = status(shard=1)  # asked a little later
    for trainer in later.trainers:
        trainer.steps += 7
    assert rendered(status(), later)[5].split()[5] == "1"


def test_before_anybody_has_joined_there_are_servers_only() -> None:
    lines = rendered(StatusReply(shards=1, nranks=2, state="waiting for trainers"))
    assert len(lines) == 2


# Prometheus


def figures(status: Callable[[], StatusReply]) -> dict[str, float]:
    with (
        serve_metrics(status, "127.0.0.1", 0) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer,
    ):
        text = answer.read().decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_prometheus_hears_who_waits_and_who_is_behind() -> None:
    told = status()
    told.trainers[1].waiting = True
    found = figures(lambda: told)
    assert found["gradsync_waiting_trainers"] == 1
    assert found['gradsync_staleness_steps{rank="0"}'] == 1
    assert found['gradsync_staleness_steps{rank="1"}'] == 0
    told.trainers[0].left = True
    assert figures(lambda: told)['gradsync_staleness_steps{rank="0"}'] == 0


def test_prometheus_reads_the_same_figures() -> None:
    with ParameterServer("127.0.0.1:0", 2) as server, serve_metrics(server.status, "127.0.0.1", 0) as port:
        averaging(server, "grpc", lambda connection, step: None)
        server.wait()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        with pytest.raises(PortInUse, match=f"metrics at 127.0.0.1:{port}.*choose another --metrics-port"):
            serve_metrics(server.status, "127.0.0.1", port).__enter__()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["gradsync_steps_total"]) == STEPS
    assert float(values["gradsync_waiting_trainers"]) == 0
    assert float(values["gradsync_training"]) == 0
    assert float(values['gradsync_times_last_total{rank="1"}']) == STEPS
    assert float(values['gradsync_arrival_lag_seconds{rank="1"}']) > 0
    assert float(values['gradsync_bytes_total{data_plane="grpc",direction="pushed",rank="0"}']) == 4 * 1008 * STEPS


# Health


def health_of(address: str, service: str = SERVICE) -> int:
    with member_channel(address) as channel:
        return int(HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=10).status)


def test_a_health_check_says_whether_trainers_can_be_served() -> None:
    with ParameterServer("127.0.0.1:0", 1) as server:
        assert health_of(server.address) == health_of(server.address, "") == HealthCheckResponse.SERVING
        with connect([server.address], 0, 1) as connection:
            connection.register(np.zeros(4, np.float32))
        server.wait()
        assert health_of(server.address) == HealthCheckResponse.NOT_SERVING


# Stopping


def test_a_server_told_to_stop_ends_the_step_first() -> None:
    """Rank 0 has committed: so the step is completed, and then both hear why."""

    def body(rank: int) -> list[float]:
        seen = []
        with connect([server.address], rank, 2) as connection:
            connection.register(np.zeros(4, np.float32))
            for step in range(2):
                mean = np.empty(4, np.float32)
                connection.push(np.full(4, rank + step, np.float32))
                if rank:
                    wait_for_commit(server, step)
                    server.stop("was told to stop (SIGTERM)")
                    assert server.status().state == "training"
                connection.pull(mean)
                seen.append(float(mean[0]))
                connection.barrier()
        return seen

    with ParameterServer("127.0.0.1:0", 2) as server:
        errors = [outcome.error for outcome in outcomes_of(2, body)]
        assert health_of(server.address) == HealthCheckResponse.NOT_SERVING
        assert server.steps == 1
    for error in errors:
        assert isinstance(error, PeerLost)
        assert str(error) == f"server 0 at {server.address} was told to stop (SIGTERM)"


def start_server(folder: Path, *flags: str) -> tuple[subprocess.Popen[str], str]:
    file = folder / "address"
    command = [sys.executable, "-m", "ps.server", "--port", "0", "--address-file", str(file), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    for line in process.stdout:
        if "listens on" in line:
            return process, line.split("listens on ")[1].split()[0]
    raise AssertionError("the server did not start")


@pytest.mark.processes
def test_the_commands(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    process, address = start_server(tmp_path, "--nranks", "2", "--metrics-port", "0")
    wait_until(lambda: (tmp_path / "address").exists())
    command = [sys.executable, "-m", "ps.status", "--servers", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[1].split() == ["0/1", address, "0", "0.0", "waiting", "for", "trainers"]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == PeerLost.exit_code  # as the pages say, and not 143
    assert re.search(r"metrics at http://127\.0\.0\.1:\d+/metrics", out)
    assert f"server 0 at {address} was told to stop (SIGTERM)" in out.splitlines()[-1]
    gone = subprocess.run([*command, "--timeout", "0.5"], capture_output=True, text=True, timeout=60, check=False)
    assert gone.returncode != 0
    assert f"nobody answered at {address} within 0.5 s" in gone.stderr
