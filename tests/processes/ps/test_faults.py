"""Trainers, servers and launchers that are killed or frozen are named by all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("paddle")


from common.errors import GradSyncError, PeerLost, PeerStalled
from common.launch.flags import TrainingConfig
from common.paddle_api.arena_binding import layout_of
from common.tensors.arena import Arena
from common.tensors.optimizers import Adam
from common.trainer.models import make_model
from common.trainer.training import check_same_flags
from ps.client.client import Client
from ps.store.modes import SYNC, Mode
from ps.synchronizer import ServerSynchronizer
from tests.support.commands import JOB, Started, can_listen, start_server, until
from tests.support.groups import sample

pytestmark = pytest.mark.processes
planes = pytest.mark.parametrize("plane", ["shm", "tcp"])
NOTICE_S = 1.0 + 5.0  # to notice a death, and for a process to end, on a loaded machine


class Observer:
    """The test as rank 0: no process, so that it knows which step the others have come to."""

    def __init__(self, addresses: Sequence[str], nranks: int, *, mode: Mode = SYNC, plane: str = "auto") -> None:
        self.client = Client(addresses, 0, nranks, mode=mode, data_plane=plane)
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
            self.client._servers.wait_for_step(1 << 40, "watching")
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
        (SYNC, ["--data-plane", "tcp"], "3"),
        pytest.param(SYNC, ["--data-plane", "grpc"], "3", marks=pytest.mark.long),
        pytest.param(Mode("ssp", 1), ["--mode", "ssp", "--staleness", 1], "", marks=pytest.mark.long),
        pytest.param(Mode("async"), ["--mode", "async"], "", marks=pytest.mark.long),
        (Mode("geo", 3), ["--mode", "geo", "--local-steps", 3], ""),
    ],
    ids=["sync", "tcp, committed ahead", "grpc, committed ahead", "ssp", "async", "geo"],
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


@planes
def test_a_killed_server_is_named_by_all_within_a_second(plane: str, start: Callable[..., Started]) -> None:
    servers, addresses = zip(*(start_server(start, 2, "--shard", f"{i}/2") for i in (0, 1)), strict=True)
    (trainer,) = start_trainers(start, addresses, 2, "--data-plane", plane)
    observer = Observer(addresses, 2, plane=plane)
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


@pytest.mark.parametrize("plane", ["shm", pytest.param("tcp", marks=pytest.mark.long)])
def test_a_frozen_trainer_is_named_within_the_limit(plane: str, start: Callable[..., Started]) -> None:
    limit = 3.0  # the server's, also for the group to come together
    server, address = start_server(start, 2, "--timeout", limit)
    (trainer,) = start_trainers(start, [address], 2, "--data-plane", plane)
    until(lambda: is_connected(address), "the trainer")
    observer = Observer([address], 2, plane=plane)
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


@planes
def test_a_frozen_server_is_named_within_the_limit(
    plane: str, start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps.client.servers.GRACE", 0.0)
    server, address = start_server(start, 1)
    observer = Observer([address], 1, plane=plane)
    observer.go_to(3)
    assert observer.client.data_plane == plane
    server.process.send_signal(signal.SIGSTOP)
    state = Path(f"/proc/{server.process.pid}/stat")  # proc(5): T is stopped
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "the server to stop")
    observer.client._servers.timeout = 0.5
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
    children = until(lambda: len(found := children_of(run.process.pid)) >= 3 and found, "three children")  # and a guard
    line = (logs / "serverlog.0").read_text()
    port = int(line.split(" listens on ")[1].split()[0].rpartition(":")[2])
    run.process.kill()
    run.process.wait()
    all_end(children)
    until(lambda: can_listen(port), "the server's port")  # a zombie's other threads may hold it for a moment


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
    children = until(lambda: len(found := children_of(run.process.pid)) >= 2 and found, "two children")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.code == 128 + signal.SIGTERM
    all_end(children)
