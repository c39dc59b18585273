"""Row 16: 500 connections of strangers, slow ones and half-open ones among them, hold nobody up for long."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest

from common.network.proofs import ANSWER, HANDSHAKE_S
from tests.faults.crowd import COUNT, WHERE
from tests.faults.jobs import SCHEMES, Start
from tests.support.commands import Started, start_server, until
from tests.support.crowds import SAYINGS
from tests.support.groups import free_port
from tests.support.ports import ports_of

MOST = 2.0
LATE_S = 1.5  # of who looks whether they are there still
EACH = 20


def tcp_ports(process: Started) -> list[int]:
    return sorted(each.address[1] for each in ports_of([process.process.pid]) if isinstance(each.address, tuple))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_five_hundred_strangers(scheme: str, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against nobody at all, and, which says how much of it is ours, the same crowd at a port of nobody's."""
    over, servers = tmp_path / "turns", list[Started]()
    if scheme == "ps":
        server, address = start_server(start, 2)
        servers, ports = [server], tcp_ports(server)
    else:
        ports = [free_port()]
        address = f"127.0.0.1:{ports[0]}"
    ranks = [start("tests.faults.honest", scheme, rank, address, over) for rank in range(2)]
    until(lambda: all("ready" in each.out for each in ranks), "the ranks")
    start("tests.faults.crowd", over, *ports).ended_well()
    for each in (*ranks, *servers):
        assert each.code == 0, each.err
    turns = json.loads(over.read_text())
    done = json.loads(ranks[1].out.splitlines()[-1])
    seconds = {
        each: median(took for at, took in done if any(a <= at < b for a, b, where in turns if where == each))
        for each in WHERE
    }
    what = {"ps": "a step", "collective": "a meeting"}[scheme]
    with capsys.disabled():
        print(
            f"\n{scheme}: {what} takes {1e3 * seconds['here']:.1f} ms while {COUNT} strangers come to its ports, "
            f"{1e3 * seconds['elsewhere']:.1f} while they come to nobody's, {1e3 * seconds['nowhere']:.1f} without any"
        )
    assert seconds["here"] <= MOST * seconds["elsewhere"]
    assert seconds["here"] <= MOST * seconds["nowhere"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_is_slow_or_stops_half_way_is_dropped_in_time(scheme: str, start: Start) -> None:
    if scheme == "ps":
        member, _ = start_server(start, 2)
        kinds = 2
    else:
        place = f"127.0.0.1:{free_port()}"
        flags = ["--rank", 0, "--nranks", 2, "--rendezvous", place, "--backend", "tcp"]
        member, kinds = start("collective.trainer", *flags), 2
    ports = until(lambda: len(found := tcp_ports(member)) >= kinds and found, "its ports")
    begin, open_ones = time.monotonic(), list[socket.socket]()
    for number in range(EACH):
        for port in ports:
            stranger = socket.create_connection(("127.0.0.1", port), 5.0)
            open_ones.append(stranger)
            stranger.setblocking(False)
            said = SAYINGS[number % len(SAYINGS)]
            with suppress(OSError):
                stranger.send(said[: min(len(said) // 2, ANSWER.size - 1)])
    left = open_ones
    while left := [each for each in left if is_open(each)]:
        assert time.monotonic() - begin < HANDSHAKE_S + LATE_S, f"{len(left)} are still there"
        time.sleep(0.02)
    for each in open_ones:
        each.close()
    assert member.process.poll() is None


def is_open(stranger: socket.socket) -> bool:
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
