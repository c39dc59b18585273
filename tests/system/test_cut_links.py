"""A link that is cut is told as such, by both ends, within the timeout; a process that is frozen behind it is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.netlab.cluster import Cluster, why_no_cluster
from common.credentials.token import make_token
from tests.support.groups import ROOT

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "-"),
]
TIMEOUT_S = 4.0
NOTICE_S = TIMEOUT_S + 1.0 + 3.0  # a trainer gives its server a second; and to end, on a loaded machine
RING = """
import sys, time, collective
with collective.connect(int(sys.argv[1]), 2, "10.77.0.1:8600", timeout=float(sys.argv[2])) as group:
    array = group.empty(100_000)
    for step in range(100_000):
        group.all_reduce(array)
        print(step, flush=True)
        time.sleep(0.02)
"""
TRAINER = """
import sys, time, ps
with ps.connect(["10.77.0.1:8500"], int(sys.argv[1]), 2, timeout=float(sys.argv[2]), data_plane=sys.argv[3]) as servers:
    gradients = servers.empty(100_000)
    servers.register(servers.empty(100_000), None)
    for step in range(100_000):
        servers.push_pull(gradients)
        print(step, flush=True)
        time.sleep(0.02)
"""
LATE = """
        if step == 5 and sys.argv[1] == "1":
            time.sleep(0.5)
            print("late", flush=True)
            time.sleep(2)
"""  # behind either of these
SERVER = ["-m", "ps.server", "--host", "10.77.0.1", "--port", "8500", "--nranks", "2", "--timeout", str(TIMEOUT_S)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    make_token(tmp_path / "token")
    monkeypatch.setenv("GRADSYNC_TOKEN_FILE", str(tmp_path / "token"))
    with Cluster([0, 0]) as made:
        yield made


class Started:
    """Process number `host` of a cluster, or more than one; what it writes goes to a file."""

    def __init__(self, cluster: Cluster, host: int, out: Path, command: list[str]) -> None:
        self._out = out
        with out.open("wb") as file:
            within = ["ip", "netns", "exec", cluster.names[host], sys.executable, *command]
            self.process = subprocess.Popen(within, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=os.environ)

    @property
    def words(self) -> str:
        return self._out.read_text()


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path, wait_until: Callable[..., None]) -> Iterator[Callable[..., list[Started]]]:
    """A function that starts a job and waits until it trains: rank 0 on the first host, rank 1 on the second."""
    started: list[Started] = []

    def start(kind: str, more_code: str = "") -> list[Started]:
        if kind != "ring":
            started.append(Started(cluster, 0, tmp_path / "server", SERVER))
        code, more = (RING, []) if kind == "ring" else (TRAINER, [kind])
        for rank in range(2):
            arguments = ["-c", code + more_code, str(rank), str(TIMEOUT_S), *more]
            started.append(Started(cluster, rank, tmp_path / f"rank {rank}", arguments))
        wait_until(lambda: all("\n5\n" in each.words for each in started[-2:]), 60)
        return started

    yield start
    for each in started:
        each.process.send_signal(signal.SIGCONT)
        each.process.kill()
        each.process.wait()


@pytest.mark.parametrize("kind", ["ring", pytest.param("tcp", marks=pytest.mark.longest)])
def test_both_ends_of_a_cut_link_say_that_it_is_cut(
    kind: str, cluster: Cluster, jobs: Callable[[str], list[Started]]
) -> None:
    *servers, first, second = jobs(kind)
    cluster.unplug(1)
    begin = time.monotonic()
    for each in (first, second, *servers):
        each.process.wait(60)
    assert time.monotonic() - begin < NOTICE_S
    other = "rank 0" if kind == "ring" else "server 0 at 10.77.0.1:8500"
    for each, who, host in ((first, "rank 1", "10.77.0.2"), (second, other, "10.77.0.1")):
        words = (
            f"PeerUnreachable: {who} cannot be reached: its host {host} has acknowledged nothing for 4 s (--timeout)"
        )
        assert words in each.words, each.words


@pytest.mark.longest
@pytest.mark.parametrize("kind", ["ring", "tcp", "grpc"])
def test_who_is_late_and_hears_only_that_a_connection_was_closed_says_that_the_link_is_cut(
    kind: str, cluster: Cluster, jobs: Callable[..., list[Started]], wait_until: Callable[..., None]
) -> None:
    """Rank 1's link carries nothing to the others while they wait for it, and so give up first. What they had sent as
    data is acknowledged, so that its connection's end comes through; on another one their goodbye does not."""
    *servers, first, second = jobs(kind, LATE)
    wait_until(lambda: "late" in second.words, 60)
    cluster.mute(1)
    for each in (first, second, *servers):
        each.process.wait(60)
    other = "rank 0" if kind == "ring" else "server 0 at 10.77.0.1:8500"
    for each, who, host in ((first, "rank 1", "10.77.0.2"), (second, other, "10.77.0.1")):
        assert f"PeerUnreachable: {who} cannot be reached: its host {host} has" in each.words, each.words


@pytest.mark.longest
def test_a_frozen_process_of_another_host_is_told_as_frozen(jobs: Callable[[str], list[Started]]) -> None:
    *_, first, second = jobs("tcp")
    second.process.send_signal(signal.SIGSTOP)
    first.process.wait(60)
    assert "PeerStalled: rank 1 did not take part" in first.words, first.words
