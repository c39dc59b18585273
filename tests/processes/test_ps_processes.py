"""The parameter-server commands as real processes: whole trainings, bad input, and what is killed or frozen."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from common.errors import GradSyncError, PeerLost, PeerStalled
from common.launch.config import TrainingConfig
from common.paddle_api.binding import layout_of
from common.tensors.arena import Arena, sha256_of_parameters
from common.tensors.optimizers import Adam
from common.trainer.models import make_model
from common.trainer.training import check_same_flags
from ps.client.session import Client
from ps.run import main as run_main
from ps.store.modes import SYNC, Mode
from ps.synchronizer import ServerSynchronizer
from tests.support.groups import ROOT, environment, free_port, sample
from tests.support.traces import check_causes, check_trace, read_trace

pytestmark = pytest.mark.processes

DEADLINE_S = 40.0  # of everything that ought to be done in a few seconds
NOTICE_S = 1.0 + 5.0  # to notice a death, and for a process to end, on a loaded machine
JOB = ["--model", "mlp:8", "--dataset", "synthetic", "--batch-size", "4"]


class Started:
    """A command under way; what it writes goes to files, so that it never waits for us."""

    def __init__(self, folder: Path, *command: object, through: Sequence[str] = ()) -> None:
        self.name = " ".join(map(str, command[:3]))
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            arguments = [*through, sys.executable, "-m", *map(str, command)]
            self.process = subprocess.Popen(
                arguments, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    @property
    def code(self) -> int:
        """How it ended; waits for that."""
        return self.process.wait(DEADLINE_S)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def ended_well(self) -> None:
        assert self.code == 0, f"{self.name}: {self.err}"
        assert self.err == ""

    def refused(self, *texts: str, code: int = 2) -> None:
        """It ended with this exit code and one line on stderr that holds all of `texts`."""
        assert self.code == code, f"{self.name}: {self.err}"
        (line,) = self.err.splitlines()
        for text in texts:
            assert text in line


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start(*command: object, through: Sequence[str] = ()) -> Started:
        folder = tmp_path / f"process-{len(started)}"
        folder.mkdir()
        started.append(Started(folder, *command, through=through))
        return started[-1]

    yield start
    end_all(started)


def end_all(started: Sequence[Started]) -> None:
    for one in started:
        one.process.kill()
    for one in started:
        one.process.wait()


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition` gives something, and return it."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.01)
    return found


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
        return True


# ---- whole trainings --------------------------------------------------------------------------------------------


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
        (["--mode", "async"], "async"),
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
    assert ps_run.launcher.out.startswith(f"logs of 4 processes: {ps_run.folder / 'logs'}\n")


def test_a_run_leaves_a_trace_of_all(ps_run: Run) -> None:
    check(ps_run.folder / "trace.json", servers=2)
    words = f"trace: {ps_run.folder / 'trace.json'} (open it at ui.perfetto.dev)"
    assert ps_run.launcher.out.splitlines()[1] == words


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


# ---- bad input --------------------------------------------------------------------------------------------------

BAD_FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "model": (["ps.run", "--model", "mnist-cn"], ["ps.run: UsageError:", "'mnist-cn'", "did you mean 'mnist-cnn'?"]),
    "optimizer": (["ps.run", "--optimizer", "adamm"], ["'adamm'", "did you mean 'adam'?"]),
    "no servers": (["ps.run", "--servers", "0"], ["--servers must be at least 1 (got 0)"]),
    "rank": (["ps.trainer", "--rank", "2", "--nranks", "2"], ["ps.trainer:", "rank 2 is outside 0..1"]),
    "address": (["ps.trainer", "--servers", "here"], ["'here'", "HOST:PORT"]),
    "shard": (["ps.server", "--shard", "2/2"], ["ps.server:", "'2/2'", "I/S"]),
    "port": (["ps.server", "--port", "65536"], ["--port must be in 0..65535 (got 65536)"]),
    "flag": (["ps.run", "--server", "2"], ["ps.run: UsageError: unknown flag --server; did you mean --servers?"]),
    "value": (["ps.trainer", "--rank", "one"], ["ps.trainer: UsageError: --rank must be a whole number (got 'one')"]),
    "other hosts": (["ps.server", "--host", "0.0.0.0", "--port", "0"], ["0.0.0.0", "--insecure"]),
}


@pytest.mark.parametrize("what", BAD_FLAGS)
def test_bad_flags_are_one_line_and_exit_code_2(what: str, start: Callable[..., Started]) -> None:
    command, texts = BAD_FLAGS[what]
    started = start(*command)
    started.refused(*texts)
    assert started.out == ""


def test_a_port_in_use_is_named(start: Callable[..., Started]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        start("ps.server", "--port", address.rpartition(":")[2]).refused("PortInUse", address)


def test_a_server_that_is_not_there_is_named(start: Callable[..., Started]) -> None:
    address = f"127.0.0.1:{free_port()}"
    trainer = start("ps.trainer", "--rank", 0, "--servers", address, "--timeout", 1, *JOB)
    trainer.refused("PeerUnreachable", address, "within 1 s")


def test_disagreement_about_nranks_ends_all(start: Callable[..., Started]) -> None:
    server, address = start_server(start, nranks=2)
    trainers = [start("ps.trainer", "--rank", rank, "--nranks", 2 + rank, "--servers", address) for rank in (0, 1)]
    for one in (*trainers, server):
        one.refused("RendezvousError", "nranks 3", "with 2")


def test_a_missing_data_file_is_named(start: Callable[..., Started]) -> None:
    run = start("ps.run", "--trainers", 1, "--dataset", "mnist", "--data-dir", "/nonexistent")
    assert run.code == 2
    (line,) = run.err.splitlines()
    assert line.startswith("ps.trainer: DataError: ")
    assert "/nonexistent/" in line


# ---- killed and frozen ------------------------------------------------------------------------------------------


def start_server(start: Callable[..., Started], nranks: int, *flags: object) -> tuple[Started, str]:
    server = start("ps.server", "--port", 0, "--nranks", nranks, *flags)
    line = until(lambda: "listens on" in server.out and server.out, "the server")
    return server, str(line).split(" listens on ")[1].split()[0]


class Observer:
    """The test as rank 0: no process, so that it knows which step the others have come to."""

    def __init__(self, addresses: Sequence[str], nranks: int, *, mode: Mode = SYNC) -> None:
        self.client = Client(addresses, 0, nranks, mode=mode)
        self.arena = Arena(layout_of(make_model("mlp:8", seed=1)))
        self.client.register(self.arena, Adam())
        config = TrainingConfig(model="mlp:8", dataset="synthetic", batch_size=4, steps=100_000)
        check_same_flags(config, ServerSynchronizer(self.client))

    def step(self) -> None:
        self.arena.gradients[...] = sample(0, self.arena.layout.length, "float32", seed=self.client.step)
        for bucket in range(len(self.arena.buckets)):
            self.client.push(bucket)
        self.client.commit(0.001)

    def go_to(self, step: int) -> None:
        while self.client.step < step:
            self.step()

    def hears(self) -> GradSyncError:
        """What the next steps raise (one may still complete with what the other had sent); the observer then leaves."""
        with pytest.raises(GradSyncError) as caught, self.client:
            self.go_to(self.client.step + 2)
        return caught.value

    def hears_at_once(self) -> GradSyncError:
        """What arrives while it waits; its own step could still complete with what the dead had sent before."""
        with pytest.raises(GradSyncError) as caught, self.client:
            self.client._wait_for_step(1 << 40, "watching")
        return caught.value


def start_trainers(
    start: Callable[..., Started], addresses: Sequence[str], nranks: int, *more: object
) -> list[Started]:
    flags = [*JOB, *more, "--steps", 100_000, "--nranks", nranks, "--servers", ",".join(addresses)]
    return [start("ps.trainer", "--rank", rank, *flags) for rank in range(1, nranks)]


@pytest.mark.parametrize(
    ("mode", "flags", "at"),
    [
        (SYNC, [], "3"),
        (SYNC, ["--data-plane", "grpc"], "3"),
        (Mode("ssp", 1), ["--mode", "ssp", "--staleness", 1], ""),
        (Mode("async"), ["--mode", "async"], ""),
        (Mode("geo", 3), ["--mode", "geo", "--local-steps", 3], ""),
    ],
    ids=["sync", "sync, committed ahead", "ssp", "async", "geo"],
)
def test_a_killed_trainer_is_named_by_all_within_a_second(
    mode: Mode, flags: list[object], at: str, start: Callable[..., Started]
) -> None:
    """In sync mode at the step that the others wait in; in the others trainers are at different ones."""
    server, address = start_server(start, 3)
    first, second = start_trainers(start, [address], 3, *flags)
    observer = Observer([address], 3, mode=mode)
    observer.go_to(3)
    begin = time.monotonic()
    first.process.kill()
    error = observer.hears_at_once()
    assert time.monotonic() - begin < 1.0
    assert isinstance(error, PeerLost)
    assert f"rank 1 died at step {at}" in str(error)
    for one in (second, server):
        one.refused(f"PeerLost: rank 1 died at step {at}", code=4)
    assert time.monotonic() - begin < NOTICE_S
    assert can_listen(int(address.rpartition(":")[2]))


def test_a_killed_server_is_named_by_all_within_a_second(start: Callable[..., Started]) -> None:
    servers, addresses = zip(*(start_server(start, 2, "--shard", f"{i}/2") for i in (0, 1)), strict=True)
    (trainer,) = start_trainers(start, addresses, 2)
    observer = Observer(addresses, 2)
    observer.go_to(3)
    begin = time.monotonic()
    servers[1].process.kill()
    error = observer.hears_at_once()
    assert time.monotonic() - begin < 1.0
    assert isinstance(error, PeerLost)
    for text in (str(error), trainer_line(trainer), trainer_line(servers[0])):
        assert f"server 1 at {addresses[1]}" in text
    assert time.monotonic() - begin < NOTICE_S


def trainer_line(started: Started) -> str:
    started.refused("PeerLost", code=4)
    return started.err


def test_a_frozen_trainer_is_named_within_the_limit(start: Callable[..., Started]) -> None:
    limit = 3.0  # the server's, also for the group to come together
    server, address = start_server(start, 2, "--timeout", limit)
    (trainer,) = start_trainers(start, [address], 2)
    until(lambda: is_connected(address), "the trainer")
    observer = Observer([address], 2)
    observer.go_to(3)
    begin = time.monotonic()
    trainer.process.send_signal(signal.SIGSTOP)
    error = observer.hears()
    assert limit - 1.0 < time.monotonic() - begin < limit + NOTICE_S  # it may have been late when it was frozen
    assert isinstance(error, PeerStalled)
    step = observer.client.step  # 3, or 4 if the frozen one had already sent the third
    server.refused(f"PeerStalled: rank 1 did not take part in step {step} for 3 s", code=4)
    assert time.monotonic() - begin < limit + 2 * NOTICE_S
    trainer.process.send_signal(signal.SIGCONT)
    assert trainer.code == 4, trainer.err


def test_a_frozen_server_is_named_within_the_limit(
    start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps.client.session.GRACE", 0.0)
    server, address = start_server(start, 1)
    observer = Observer([address], 1)
    observer.go_to(3)
    assert observer.client.data_plane == "shm"
    server.process.send_signal(signal.SIGSTOP)
    state = Path(f"/proc/{server.process.pid}/stat")  # proc(5): T is stopped
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "the server to stop")
    observer.client.timeout = 0.5
    begin = time.monotonic()
    with pytest.raises(PeerStalled) as caught:
        observer.step()
    assert 0.5 <= time.monotonic() - begin < NOTICE_S
    text = f"server 0 at {address} did not answer within 0.5 s while waiting for the result of step 3; it is frozen or"
    assert str(caught.value).startswith(text)
    server.process.kill()  # so that it need not be taken leave of
    observer.client.close()


def is_connected(address: str) -> bool:
    """Somebody has a connection to the server there (proc(5): state 01 is ESTABLISHED)."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return any(line[1].endswith(port) and line[3] == "01" for line in lines)


def test_a_killed_launcher_leaves_nothing(start: Callable[..., Started], tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run = start("ps.run", "--trainers", 2, "--servers", 1, "--steps", 100_000, *JOB, "--log-dir", logs)
    until((logs / "workerlog.1").exists, "the last trainer to be started")
    children = until(lambda: len(found := children_of(run.process.pid)) == 3 and found, "three children")
    line = (logs / "serverlog.0").read_text()
    port = int(line.split(" listens on ")[1].split()[0].rpartition(":")[2])
    run.process.kill()
    run.process.wait()
    all_end(children)
    assert can_listen(port)


def all_end(children: Sequence[int]) -> None:
    """Soon, by themselves; else they are ended, for they are not ours to wait for."""
    try:
        until(lambda: not any(map(is_alive, children)), "the children to end")
    finally:
        for child in filter(is_alive, children):
            os.kill(child, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_sigterm_to_the_launcher_ends_all(start: Callable[..., Started], tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run = start("ps.run", "--trainers", 1, "--steps", 100_000, *JOB, "--log-dir", logs)
    children = until(lambda: len(found := children_of(run.process.pid)) == 2 and found, "two children")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.code == 128 + signal.SIGTERM
    all_end(children)


def test_update_is_for_programs_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(["--update", "server"]) == 2
    assert capsys.readouterr().err == (
        "ps.run: UsageError: --update is for your own program; in the built-in training servers update\n"
    )
    assert run_main(["--update", "sever", "script.py"]) == 2
    assert "unknown update 'sever'; did you mean 'server'" in capsys.readouterr().err
