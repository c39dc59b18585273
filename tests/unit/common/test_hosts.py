"""The flags for hosts and devices: what they mean together, what contradicts, and how launchers find each other."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("tyro")

from collective.command_flags import CollectiveRunConfig
from common.credentials.credentials import using
from common.errors import GradSyncError, PeerUnreachable, RendezvousError, UsageError
from common.launch import hosts
from common.launch.cli import run_command
from common.launch.hosts import HostsConfig, Node, Place, find_node, find_place, start_rank
from common.launch.lobby import Lobby
from common.launch.ranks import endpoints_of
from ps.command_flags import RunConfig
from tests.support.channels import OTHERS
from tests.support.groups import ROOT, free_port

LIMIT_S = 20.0
TWO = "10.0.0.1,10.0.0.2"
OURS, ANOTHERS = "127.0.0.1", "192.0.2.7"  # the latter is for documentation only (RFC 5737)


@pytest.fixture(autouse=True)
def no_visible_devices_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def parsed(config: type[Any], text: str) -> Any:
    got: list[Any] = []
    assert run_command(config, got.append, prog="a.command", args=text.split()) == 0
    return got[0]


@pytest.mark.parametrize("config", [CollectiveRunConfig, RunConfig])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", HostsConfig()),
        ("--devices 0,1", HostsConfig(devices="0,1")),
        ("--gpus 0,1", HostsConfig(devices="0,1")),
        ("--nproc_per_node 4 --insecure", HostsConfig(nproc_per_node=4, insecure=True)),
        (f"--ips {TWO}", HostsConfig(ips=TWO)),
        ("--master a:1 --nnodes 2 --node-rank 1", HostsConfig(master="a:1", nnodes=2, node_rank=1)),
        ("--master=a:1 --nnodes=2 --node_rank=1", HostsConfig(master="a:1", nnodes=2, node_rank=1)),
    ],
)
def test_flags_of_paddles_launcher(config: type[Any], flags: str, expected: HostsConfig) -> None:
    assert parsed(config, flags).hosts == expected


REFUSED = {
    "--nranks 3 --devices 0,1": "the flags contradict each other: --nranks 3 (3 on each host) and "
    "--devices 0,1 (2 on each host); give one of them",
    "--devices 0 --nproc_per_node 2": "the flags contradict each other: --devices 0 (1 on each host) and "
    "--nproc-per-node 2 (2 on each host); give one of them",
    f"--nranks 2 --devices 0,1 --ips {TWO}": "the flags contradict each other: --nranks 2 (1 on each host) and "
    "--devices 0,1 (2 on each host); give one of them",
    f"--nranks 3 --ips {TWO}": "--nranks 3 cannot be divided equally among 2 hosts",
    "--nranks 0": "--nranks must be at least 1 (got 0)",
    "--nproc-per-node 0": "--nproc-per-node must be at least 1 (got 0)",
    f"--nproc-per-node 513 --ips {TWO}": "--nranks can be at most 1024 (got 1026)",
    "--host-wait -1 --nnodes 2": "--host-wait must be a number of seconds, at least 0 (got -1.0)",
    "--host-wait 5": "--host-wait is of several hosts (--nnodes or --ips)",
    "--spares -1": "--spares must be at least 0 (got -1)",
    "--spares 1": "--spares is of several hosts (--nnodes)",
    f"--spares 1 --ips {TWO}": "--spares needs --master and --nnodes, not --ips, by which no other can take a host's "
    "place",
    "--nnodes 2 --master a:1 --spares 1 --node-rank 3": "--node-rank 3 is outside 0..2; --nnodes says how many, and 1 "
    "of --spares",
    "--nnodes 0": "--nnodes must be at least 1 (got 0)",
    "--devices 0,x": "--devices must be numbers separated by commas, as in 0,1 (got '0,x')",
    "--ips 10.0.0.1,": "--ips must be addresses separated by commas, as in 10.0.0.1,10.0.0.2 (got '10.0.0.1,')",
    "--ips=": "--ips must be addresses separated by commas, as in 10.0.0.1,10.0.0.2 (got '')",
    "--devices=": "--devices must be numbers separated by commas, as in 0,1 (got '')",
    f"--ips {TWO} --nnodes 3": "--nnodes 3 contradicts --ips, which lists 2; leave --nnodes out",
    f"--ips {TWO} --node-rank 2": "--node-rank 2 is outside 0..1; --nnodes says how many",
    "--node-rank 1": "--node-rank 1 is outside 0..0; --nnodes says how many",
    "--nnodes 2": "--nnodes 2 needs --master HOST:PORT, where the hosts meet, or --ips",
    "--nnodes 2 --master a:1": "--nnodes 2 needs --node-rank 0..1: which host is this?",
    "--nnodes 2 --master a": "not an address: 'a'; expected HOST:PORT, as in 127.0.0.1:8500",
}


@pytest.mark.parametrize("config", [CollectiveRunConfig, RunConfig])
@pytest.mark.parametrize("flags", REFUSED)
def test_what_contradicts_is_one_line(config: type[Any], flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(config, lambda _: pytest.fail("ran"), prog="a.command", args=flags.split()) == 2
    assert capfd.readouterr() == ("", f"a.command: UsageError: {REFUSED[flags]}\n")


@pytest.mark.parametrize(
    ("config", "nranks", "expected"),
    [
        (HostsConfig(), None, 2),
        (HostsConfig(), 5, 5),
        (HostsConfig(devices="3"), None, 1),
        (HostsConfig(devices="0,1,2"), 3, 3),
        (HostsConfig(nproc_per_node=3), None, 3),
        (HostsConfig(ips=TWO), None, 2),
        (HostsConfig(ips=TWO), 6, 3),
        (HostsConfig(ips=TWO, devices="0,1,2", nproc_per_node=3), 6, 3),
        (HostsConfig(master="a:1", nnodes=4, node_rank=3), 4, 1),
    ],
)
def test_ranks_on_each_host(config: HostsConfig, nranks: int | None, expected: int) -> None:
    assert config.ranks_each(nranks) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (HostsConfig(), ""),
        (HostsConfig(ips="10.0.0.1"), ""),
        (HostsConfig(master="a:1"), ""),
        (HostsConfig(ips=TWO), "10.0.0.1:8600"),
        (HostsConfig(ips="::1,::2"), "[::1]:8600"),
        (HostsConfig(ips=TWO, master="a:1"), "a:1"),
        (HostsConfig(master="a:1", nnodes=2, node_rank=1), "a:1"),
    ],
)
def test_meeting_places(config: HostsConfig, expected: str) -> None:
    assert config.meeting_place == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (HostsConfig(), 0),
        (HostsConfig(ips=f"{OURS},{ANOTHERS}"), 0),
        (HostsConfig(ips=f"{ANOTHERS}, {OURS}"), 1),
        (HostsConfig(ips=TWO, node_rank=1), 1),
        (HostsConfig(ips=f"{ANOTHERS},{OURS}", node_rank=0), 0),
        (HostsConfig(master="a:1", nnodes=3, node_rank=2), 2),
    ],
)
def test_which_host_this_is(config: HostsConfig, expected: int) -> None:
    assert config.position() == expected


@pytest.mark.parametrize(("ips", "count"), [(f"{ANOTHERS},192.0.2.8", "none"), (f"{OURS},localhost", "2")])
def test_not_one_of_the_hosts(ips: str, count: str) -> None:
    message = f"{count} of --ips {ips} are addresses of this machine.*--node-rank 0..1"
    with pytest.raises(UsageError, match=message):
        HostsConfig(ips=ips).position()


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        (None, "0,3", ("0", "3")),
        ("", "0,3", ("0", "3")),
        ("all", "3", ("3",)),
        ("4,5,7", "7,4", ("2", "0")),
        ("4,5", None, ()),
    ],
)
def test_devices_as_paddle_numbers_them(
    visible: str | None, devices: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert HostsConfig(devices=devices).selected_devices() == expected


def test_a_device_that_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UsageError, match="--devices 0,1: not among CUDA_VISIBLE_DEVICES=4,5"):
        HostsConfig(devices="0,4,1").selected_devices()


def test_the_only_host() -> None:
    node = find_node(HostsConfig(devices="1,0"), None, ports=1)
    assert node == Node(0, 1, "", ("127.0.0.1:6170", "127.0.0.1:6171"), ("1", "0"))
    assert (node.nranks, list(node.ranks)) == (2, [0, 1])


def test_the_second_of_two_hosts() -> None:
    config = HostsConfig(ips=f"{ANOTHERS},{OURS}", devices="4,6")
    with using(OTHERS):
        node = find_node(config, 4, ports=1)
    endpoints = (f"{ANOTHERS}:6170", f"{ANOTHERS}:6171", f"{OURS}:6170", f"{OURS}:6171")
    assert node == Node(1, 2, f"{ANOTHERS}:8600", endpoints, ("4", "6"), f"{ANOTHERS}:8601", named=True)
    assert (node.nranks, list(node.ranks)) == (4, [2, 3])
    assert node.environment(3) == {
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_TRAINERS_NUM": "4",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": f"{OURS}:6171",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_RANK_IN_NODE": "1",
        "PADDLE_NNODES": "2",
        "FLAGS_selected_gpus": "6",
    }


def test_other_hosts_need_credentials() -> None:
    with pytest.raises(UsageError, match=r"refusing to listen on 10\.0\.0\.1.*token FILE.*--insecure"):
        find_node(HostsConfig(ips=TWO, node_rank=0), None, ports=1)


def test_a_host_is_waited_for_only_where_the_job_is_started_again() -> None:
    with pytest.raises(
        UsageError, match=r"^--host-wait needs --max-restarts: without it a job that loses a host has fa"
    ):
        found(HostsConfig(ips=TWO, host_wait=9))


def test_spares_wait_only_where_the_job_is_started_again() -> None:
    config = HostsConfig(master="a:1", nnodes=2, node_rank=2, spares=1)
    with pytest.raises(UsageError, match=r"^--spares needs --max-restarts: without it a job that loses a host has fa"):
        found(config)


def found(config: HostsConfig, timeout: float = LIMIT_S) -> Node:
    with find_place(config, None, ports=1, timeout=timeout, restarts=False) as place:
        return place.node


def find_all(configs: list[HostsConfig], *, timeout: float = LIMIT_S) -> list[Any]:
    """What the launchers of several hosts, here threads, find: a Node, or an error."""

    def find(config: HostsConfig) -> Node | GradSyncError:
        try:
            return found(config, timeout)
        except GradSyncError as exc:
            return exc

    with ThreadPoolExecutor(len(configs)) as pool:
        return list(pool.map(find, configs))


def test_launchers_tell_each_other_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "own_host", lambda first: {"127.0.0.1": "127.0.0.9"}[first])
    master = f"127.0.0.1:{free_port()}"
    found = find_all([HostsConfig(master=master, nnodes=3, node_rank=rank, nproc_per_node=1) for rank in (2, 0, 1)])
    assert [node.index for node in found] == [2, 0, 1]
    assert {node.endpoints for node in found} == {endpoints_of(["127.0.0.1", "127.0.0.9", "127.0.0.9"], 1)}
    assert {node.meeting_place for node in found} == {master}


@pytest.mark.parametrize(("ports", "where"), [(1, "127.0.0.1:8601"), (3, "127.0.0.1:8603")])
def test_launchers_meet_after_the_ports_that_the_job_needs(ports: int, where: str) -> None:
    config = HostsConfig(master="127.0.0.1:8600", nnodes=2, node_rank=1)
    assert find_node(config, 2, ports=ports).launchers_meet == where


def test_the_only_host_agrees_with_itself() -> None:
    assert Place(Node(0, 1, "", ()), LIMIT_S).agree(3) == 3


def test_a_host_that_comes_to_a_job_under_way_learns_its_epoch_and_is_known_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "own_host", lambda first: "127.0.0.9")
    master = f"127.0.0.1:{free_port()}"
    config = HostsConfig(master=master, nnodes=2, node_rank=1, nproc_per_node=1)
    node = replace(find_node(config, None, ports=1), index=0, endpoints=("127.0.0.1:6170", "lost:6170"))
    with ThreadPoolExecutor(1) as pool, Lobby(node.launchers_meet, 2, silence=LIMIT_S) as lobby:
        first = Place(node, LIMIT_S, company=lobby)
        other = pool.submit(first.meet, 4, LIMIT_S)
        with find_place(config, None, ports=1, timeout=LIMIT_S, restarts=True) as place:
            other.result()
            assert place.node.epoch == first.node.epoch == 4
    assert first.node.endpoints == place.node.endpoints == ("127.0.0.1:6170", "127.0.0.9:6170")


def test_launchers_that_disagree_are_all_told() -> None:
    master = f"127.0.0.1:{free_port()}"
    found = find_all([HostsConfig(master=master, nnodes=2 + rank, node_rank=rank) for rank in (0, 1)])
    text = "host 1 was started with nnodes 3, the group with 2; give all the same --nnodes"
    assert [(type(error), str(error)) for error in found] == [(RendezvousError, text)] * 2


def test_two_launchers_with_one_number_are_told() -> None:
    master = f"127.0.0.1:{free_port()}"
    found = find_all([HostsConfig(master=master, nnodes=3, node_rank=rank) for rank in (0, 1, 1)])
    assert {str(error) for error in found} == {"host 1 joined twice; give every host its own --node-rank"}


def test_a_host_that_does_not_come_is_named() -> None:
    master, begin = f"127.0.0.1:{free_port()}", time.monotonic()
    (error,) = find_all([HostsConfig(master=master, nnodes=2, node_rank=0)], timeout=0.3)
    assert isinstance(error, RendezvousError)
    text = "1 of 2 hosts joined within 0.3 s; missing: host 1"
    text += ": not started, refused for its credentials (it says so), ended without joining, or too slow"
    assert str(error) == f"{text} (then raise --timeout)"
    (error,) = find_all([HostsConfig(master=master, nnodes=2, node_rank=1)], timeout=0.3)
    assert isinstance(error, PeerUnreachable)
    assert time.monotonic() - begin < LIMIT_S


class Recorder:
    """In the place of a Job: notes what it is to start."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def start(self, name: str, command: list[str], *, log: str, environment: dict[str, str], on_terminal: bool) -> None:
        self.started.append((name, command, log, environment["PADDLE_LOCAL_RANK"], environment["MORE"], on_terminal))


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ([], ["-m", "a.trainer", "--rank", "RANK"]),
        (["a.py", "--lr", "1"], [str(ROOT / "common" / "program" / "start.py"), "a.py", "--lr", "1"]),
    ],
)
def test_a_hosts_ranks_are_started(script: list[str], command: list[str]) -> None:
    job: Any = Recorder()
    node = Node(1, 2, "10.0.0.1:8600", endpoints_of(["10.0.0.1", "10.0.0.2"], 2))
    for rank in node.ranks:
        start_rank(rank, job, node, script=script, trainer=["-m", "a.trainer"], environment={"MORE": "5"})

    def of_rank(rank: int) -> list[str]:
        return [word.replace("RANK", str(rank)) for word in command]

    assert job.started == [
        ("rank 2", of_rank(2), "workerlog.2", "0", "5", True),
        ("rank 3", of_rank(3), "workerlog.3", "1", "5", False),
    ]
