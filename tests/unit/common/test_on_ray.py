"""`--engine ray` without Ray: its flags, where processes are put, and what an actor tells the driver of one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import collective.run
import ps.run
from common.errors import PeerUnreachable, UsageError
from common.launch.child import failure_of
from common.launch.on_ray.cluster import Seats, check_address, first_line, in_order_of_nodes, variables_of_job
from common.launch.on_ray.ray_job import Remote, RemoteChild
from common.launch.on_ray.seat import News, Order, Seat
from common.system.leftovers import Session


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--address", "10.0.0.1:6379"], "--address is for --engine ray: add that"),
        (["--cpus-each", "2"], "--cpus-each is for --engine ray: add that"),
        (["--engine", "rai"], "unknown engine 'rai'; did you mean 'ray'? (known: ray)"),
        (["--engine", "ray", "--address", "here"], "not an address: 'here'; expected HOST:PORT"),
        (["--engine", "ray", "--strategy", "pack"], "unknown strategy 'pack'"),
        (["--engine", "ray", "--cpus-each", "0"], "--cpus-each must be a positive number (got 0)"),
        (["--engine", "ray", "--memory-each", "0"], "--memory-each must be at least 1 (got 0)"),
        (["--engine", "ray", "--nproc-per-node", "2"], "--nproc-per-node is for hosts with a launcher each; with"),
        (["--engine", "ray", "--token-file", "{token}"], "--token-file is of no use with --engine ray: each job gets"),
        (["--engine", "ray", "--trace", "t.json"], "--trace is for one host; leave it out with --engine ray"),
    ],
)
@pytest.mark.parametrize("launcher", [collective.run, ps.run], ids=["ring", "ps"])
def test_what_cannot_be_is_refused_in_a_line(
    launcher: Any, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    from common.credentials.token import make_token

    make_token(token)
    assert launcher.main([flag.format(token=token) for flag in flags]) == UsageError.exit_code
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_ranks_get_no_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert collective.run.main(["--engine", "ray", "--backend", "nccl"]) == UsageError.exit_code
    assert "--backend nccl is not there with --engine ray, whose ranks are given no GPUs" in capsys.readouterr().err


def test_nobody_at_the_address_is_said_at_once() -> None:
    with pytest.raises(PeerUnreachable, match=r"no cluster of Ray's at 127.0.0.1:1 \(Connection refused\); ray start "):
        check_address("127.0.0.1:1")
    with pytest.raises(UsageError, match=r"ray://10.0.0.1:10001: give HOST:PORT of the cluster's head"):
        check_address("ray://10.0.0.1:10001")


def test_ranks_of_a_node_stand_beside_each_other_after_the_servers() -> None:
    nodes = {0: "a", 1: "b", 2: "c", 3: "b", 4: "c", 5: "a"}
    assert in_order_of_nodes(nodes, 0) == [(0, "a"), (5, "a"), (1, "b"), (3, "b"), (2, "c"), (4, "c")]
    assert in_order_of_nodes(nodes, 1) == [(0, "a"), (5, "a"), (1, "b"), (3, "b"), (2, "c"), (4, "c")]
    assert in_order_of_nodes(nodes, 2) == [(0, "a"), (1, "b"), (5, "a"), (3, "b"), (2, "c"), (4, "c")]


def test_ranks_are_told_their_places() -> None:
    names = [f"rank {rank}" for rank in range(3)]
    hosts = dict(zip(names, ["10.0.0.1", "10.0.0.2", "10.0.0.2"], strict=True))
    seats = Seats({}, hosts, hosts, dict.fromkeys(names, 4000), 3)
    assert seats.meeting_place == "10.0.0.1:4000"
    told = seats.environment(2)
    assert told["PADDLE_TRAINER_ENDPOINTS"] == "10.0.0.1:6170,10.0.0.2:6170,10.0.0.2:6171"
    assert (told["PADDLE_TRAINER_ID"], told["PADDLE_LOCAL_RANK"], told["PADDLE_NNODES"]) == ("2", "1", "2")
    assert Seats({}, hosts, dict.fromkeys(names, "one"), {}, 3).meeting_place.startswith("unix-abstract:")


def test_each_job_has_a_new_secret_in_place_of_all_other_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSYNC_TOKEN_FILE", "/home/me/token")
    monkeypatch.setenv("HOME_OF_MINE", "x")
    one, other = variables_of_job(), variables_of_job()
    assert one["GRADSYNC_TOKEN"].startswith("gradsync-token-1-")
    assert one["GRADSYNC_TOKEN"] != other["GRADSYNC_TOKEN"]
    assert one["GRADSYNC_TOKEN_FILE"] == ""
    assert "HOME_OF_MINE" not in one


def test_a_message_of_rays_comes_to_its_reason() -> None:
    message = "The actor died.\n\tpid: 7\nThe actor is dead because its node has died. Node Id: 1 (the actor's).\nmore"
    assert first_line(RuntimeError(message)) == "its node has died"
    assert first_line(RuntimeError("failed\nModuleNotFoundError: No module named 'common'\n")) == (
        "ModuleNotFoundError: No module named 'common'"
    )
    assert first_line(RuntimeError("a worker was killed as memory ran low. 9 GB (IP: 10.0.0.1) of\n")) == (
        "a worker was killed as memory ran low"
    )
    assert first_line(RuntimeError("")) == "RuntimeError"


PROGRAM = """
import os, sys
print("out", flush=True); print("err", file=sys.stderr, flush=True)
open(os.environ["GRADSYNC_JOINED"], "w").write("2\\n")
open(sys.argv[2], "w").write("10.0.0.1:8500\\n")
assert sys.argv[1].endswith("start.py") and sys.argv[1] != "/there/start.py"
sys.exit(int(os.environ["CODE"]))
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory of this test's own, and an environment that is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def order(folder: Path, *, apart: bool) -> Order:
    command = ["-c", PROGRAM, "/there/start.py", "/there/scratch/server-0"]
    return Order("rank 1", command, {"CODE": "7"}, "/there/start.py", "/there/scratch", str(folder), "10.0.0.2", apart)


def all_news(seat: Seat) -> list[News]:
    told = [seat.news(10.0)]
    while told[-1].code is None:
        told.append(seat.news(10.0))
    return told


@pytest.mark.parametrize("apart", [True, False])
def test_an_actor_tells_all_of_its_process(folder: Path, apart: bool) -> None:
    seat = Seat({}, 0)
    try:
        seat.start(order(folder, apart=apart))
        told = all_news(seat)
    finally:
        seat.end()
    assert b"".join(news.out for news in told) == (b"out\n" if apart else b"out\nerr\n")
    assert b"".join(news.err for news in told) == (b"err\n" if apart else b"")
    assert b"".join(news.notes for news in told) == b"2\n"
    assert [dict(news.files) for news in told if news.files] == [{"server-0": b"10.0.0.1:8500\n"}]
    assert told[-1].code == 7


def test_an_actor_without_the_drivers_folder_says_so(folder: Path) -> None:
    seat = Seat({}, 0)
    try:
        with pytest.raises(UsageError, match=r"node 10.0.0.2 has no folder /nowhere \(No such file"):
            seat.start(order(Path("/nowhere"), apart=False))
    finally:
        seat.end()


def remote(name: str, folder: Path) -> RemoteChild:
    process: Any = Remote(None)
    paths = [folder / f"{kind} of {name}" for kind in ("log", "words", "joined")]
    for path in paths:
        path.touch()
    return RemoteChild(name, process, Session(0, None), *paths, host="10.0.0.2")


def test_a_process_that_was_killed_and_one_that_was_lost_are_named_with_their_nodes(tmp_path: Path) -> None:
    other, killed, lost = (remote(f"rank {rank}", tmp_path) for rank in range(3))
    other.take(News(code=4, out=b"PeerLost: rank 1 died\n"), tmp_path)
    killed.take(News(code=-signal.SIGKILL, notes=b"2\n"), tmp_path)
    assert (
        str(failure_of([other, killed], kept=False)) == "rank 1 was killed by SIGKILL on node 10.0.0.2 without a word"
    )
    assert killed.has_joined(2)
    lost.lose("Ray no longer reaches it")
    failure = failure_of([other, lost], kept=False)
    assert str(failure) == "rank 2 was lost on node 10.0.0.2: Ray no longer reaches it without a word"
    assert (failure.exit_code, failure.by_signal) == (137, True)
