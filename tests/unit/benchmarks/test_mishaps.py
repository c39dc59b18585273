"""A bad network: it does to packets what it says, in the shares that it was asked for, and nothing else."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from benchmarks.netlab.cluster import Cluster, why_no_cluster
from benchmarks.netlab.mishaps import Mishaps

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster()),
]
COUNT = 1000
RECEIVES = """
import json, socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    end.bind(("0.0.0.0", 5000))
    print("ready", flush=True)
    end.settimeout(20.0)
    found = []
    while not found or found[-1] != "end":
        text, sender = end.recvfrom(99)
        if text == b"hello":
            end.sendto(text, sender)
        else:
            found.append(text.decode())
print(json.dumps([int(each) for each in found[:-1]]))
"""
SENDS = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
    end.settimeout(0.05)
    for _ in range(200):  # what waits for the address of the other's card may be overtaken
        end.sendto(b"hello", (sys.argv[1], 5000))
        try:
            end.recv(99)
            break
        except TimeoutError:
            pass
    for number in range(int(sys.argv[2])):
        end.sendto(b"%d" % number, (sys.argv[1], 5000))
        time.sleep(1e-4)
    time.sleep(0.1)  # later than the latest
    for _ in range(40):
        end.sendto(b"end", (sys.argv[1], 5000))
"""


def received(**shares: float) -> list[int]:
    """Of so many datagrams, as they came."""
    with Cluster([0, 0]) as cluster, Mishaps(cluster, 1, **shares):
        receives = [*cluster.within(1), sys.executable, "-c", RECEIVES]
        with subprocess.Popen(receives, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout
            assert receiver.stdout.readline() == "ready\n"
            sends = [*cluster.within(0), sys.executable, "-c", SENDS, cluster.address(1), str(COUNT)]
            subprocess.run(sends, check=True, timeout=20.0)
            found: list[int] = json.loads(receiver.communicate(timeout=20.0)[0])
    return found


def test_a_good_one_changes_nothing() -> None:
    assert received() == list(range(COUNT))


def test_packets_are_lost() -> None:
    found = received(lost=0.2)
    assert found == sorted(set(found))
    assert 0.7 * COUNT < len(found) < 0.9 * COUNT


def test_packets_come_twice() -> None:
    found = received(twice=0.2)
    assert sorted(set(found)) == list(range(COUNT))
    assert 1.1 * COUNT < len(found) < 1.3 * COUNT


def test_packets_come_late() -> None:
    found = received(late=0.2)
    assert sorted(found) == list(range(COUNT))
    behind = sum(before > after for before, after in itertools.pairwise(found))
    assert 0.01 * COUNT < behind < 0.3 * COUNT
