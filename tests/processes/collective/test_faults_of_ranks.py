"""Real processes that are killed, frozen or raise: the others name the one at fault, in time, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from common.network.patience import WAIT_LIMIT_S
from tests.support.groups import (
    DEADLINE_S,
    PROCESSES,
    RankProcesses,
    assert_same_bits,
    free_port,
    limit_waits,
    reduced,
    sample,
    say,
)
from tests.support.thorough import and_long

pytestmark = pytest.mark.processes

KILLED_S = 1.0  # K of the fault matrix
LIMIT_S = 2.0  # the timeout of the frozen cases
STALLED_S = LIMIT_S + 1.5  # the fault matrix allows one second; the rest is for a loaded machine
SLOW_S = 2.0
WAITING_CPU = 0.2  # of a core, for each rank that waits; one that spins uses what there is, on two cores two thirds
SIZE = 300_001  # several segments a chunk, in shared memory where the backend has it

backends = pytest.mark.parametrize(
    "backend", [pytest.param("shm", marks=pytest.mark.long), "tcp", pytest.param("tcp-ring", marks=pytest.mark.long)]
)


# Bodies: what every rank does, in a process of its own


def reduces_for_ever(group, empty=None):
    array, step = (empty or group.empty)(SIZE, np.float32), 0
    while True:
        array.fill(group.rank + step)
        group.all_reduce(array, "sum", step=step)
        assert array[0] == array[-1] == sum(r + step for r in range(group.nranks))
        step += 1
        if step == 5:
            say(under_way=True)


def reduces_its_own_memory_for_ever(group):
    reduces_for_ever(group, np.empty)


def reduces_for_ever_with_a_short_limit(group):
    limit_waits([group], LIMIT_S, wait_limit=WAIT_LIMIT_S)
    reduces_for_ever(group)


def passes_messages_for_ever(group):
    """Of many pieces, round the ring; each rank sends before it receives."""
    data, step = bytes(3_000_000), 0
    limit_waits([group], LIMIT_S, wait_limit=WAIT_LIMIT_S)
    while True:
        group.messenger.send((group.rank + 1) % group.nranks, 0, data)
        assert len(group.messenger.receive((group.rank - 1) % group.nranks, 0)) == len(data)
        step += 1
        if step == 5:
            say(under_way=True)


def raises_on_rank_1(group):
    array = group.empty(SIZE)
    array.fill(1)
    for step in range(5):
        group.all_reduce(array, step=step)
        if group.rank == 1 and step == 3:
            raise ValueError("boom at step 3")


def waits_for_a_slow_rank_1(group):
    array = group.empty(SIZE)
    array.fill(1)
    group.all_reduce(array)
    if group.rank == 1:
        time.sleep(SLOW_S)  # the subject of the test, not a way to synchronise
    cpu, wall = time.process_time(), time.monotonic()
    group.all_reduce(array)
    say(cpu=time.process_time() - cpu, wall=time.monotonic() - wall)


def reduces_once(group):
    array = sample(group.rank, SIZE, "float32")
    group.all_reduce(array)
    say(result=array.tobytes().hex()[:200], digest=int(array.view(np.uint32).sum(dtype=np.uint64)))


def forks_and_reduces_for_ever(group):
    """As a DataLoader's workers do, the child lives on when its parent was killed."""
    if os.fork() == 0:
        try:
            group.barrier()
        except RuntimeError as exc:
            say(child=str(exc), parent=os.getppid(), pid=os.getpid())
        group.close("the child")
        signal.pause()
    reduces_for_ever(group)


def ends_without_goodbye(group):
    group.barrier()
    if group.rank == 1:
        os._exit(0)
    group.barrier()


# What a process holds, from /proc


def mapped_files(pid):
    return {line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}


def listening_sockets(pid):
    """Addresses at which a process listens, on TCP or on Unix sockets."""
    mine = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            mine.add(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    tcp = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    found = [row[1] for row in tcp if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    return found + [row[-1] for row in unix if row[3] == "00010000" and f"socket:[{row[6]}]" in mine]


def assert_nothing_left(ranks):
    """Called when all ranks have ended."""
    for process in ranks.processes:
        assert not Path(f"/proc/{process.pid}").exists()
    names = Path("/proc/net/unix").read_text()
    assert ranks.rendezvous.removeprefix("unix-abstract:") not in names
    assert [path for path in Path("/dev/shm").iterdir() if "gradsync" in path.name] == []


def assert_nothing_has_a_name(pid, backend):
    """What could outlive a killed process: files in /dev/shm, and ports or paths at which it listens."""
    files = mapped_files(pid)
    assert [name for name in files if name.startswith("/dev/shm")] == []
    assert any("memfd:gradsync" in name for name in files) == backend.startswith("shm")
    assert listening_sockets(pid) == []


def survivors_of(ranks, victim):
    return [rank for rank in range(len(ranks.processes)) if rank != victim]


# Tests


@backends
def test_processes_compute_what_numpy_computes(backend):
    expected = reduced([sample(rank, SIZE, "float32") for rank in range(3)], "mean")
    with RankProcesses(reduces_once, 3, backend) as ranks:
        for rank in range(3):
            said = ranks.hear(rank, "result")
            assert_same_bits(np.frombuffer(bytes.fromhex(said["result"]), np.float32), expected[:25])
            assert said["digest"] == int(expected.view(np.uint32).sum(dtype=np.uint64))
            assert ranks.hear(rank, "ended")["ended"] == "well"
            assert ranks.code(rank) == 0
        assert_nothing_left(ranks)


ONE_EACH = [
    ("shm", 1, reduces_its_own_memory_for_ever),
    ("tcp", 0, reduces_for_ever),
    ("tcp", 1, passes_messages_for_ever),
]
EACH = [*product(PROCESSES, (0, 1), (reduces_for_ever, reduces_its_own_memory_for_ever))]


@pytest.mark.parametrize(("backend", "victim", "body"), and_long(ONE_EACH, EACH))
def test_a_killed_rank_is_named_by_all_others_within_a_second(backend, victim, body):
    with RankProcesses(body, 3, backend, f"127.0.0.1:{free_port()}") as ranks:
        for rank in range(3):
            ranks.hear(rank, "under_way")
            assert_nothing_has_a_name(ranks.pid(rank), backend)
        killed = ranks.signal(victim, signal.SIGKILL)
        for rank in survivors_of(ranks, victim):
            end = ranks.hear(rank, "ended")
            assert (end["ended"], end["text"].split(":")[0]) == ("PeerLost", f"rank {victim} died")
            assert end["at"] - killed < KILLED_S
            assert ranks.code(rank) == 4
        assert ranks.code(victim) == -signal.SIGKILL
        assert_nothing_left(ranks)


@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=pytest.mark.long)])
def test_a_killed_rank_is_named_though_a_child_of_it_lives(backend):
    """And the child neither speaks for the group nor leaves it."""
    with RankProcesses(forks_and_reduces_for_ever, 3, backend) as ranks:
        children = [ranks.hear(rank, "child") for rank in range(3)]
        try:
            for rank, child in enumerate(children):
                expected = f"the group is that of process {ranks.pid(rank)}, from which this one was forked"
                assert (child["child"], child["parent"]) == (expected, ranks.pid(rank))
                ranks.hear(rank, "under_way")
            killed = ranks.signal(1, signal.SIGKILL)
            for rank in (0, 2):
                end = ranks.hear(rank, "ended")
                assert (end["ended"], end["text"].split(":")[0]) == ("PeerLost", "rank 1 died")
                assert end["at"] - killed < KILLED_S
        finally:
            for child in children:
                os.kill(child["pid"], signal.SIGKILL)


@backends
def test_a_rank_that_exits_without_a_goodbye_is_named(backend):
    with RankProcesses(ends_without_goodbye, 3, backend) as ranks:
        for rank in (0, 2):
            end = ranks.hear(rank, "ended")
            assert (end["ended"], end["text"].split(":")[0]) == ("PeerLost", "rank 1 died")
        assert ranks.code(1) == 0


@pytest.mark.parametrize(
    ("backend", "victim", "body"),
    [
        ("shm", 1, reduces_for_ever_with_a_short_limit),
        pytest.param("tcp-ring", 1, reduces_for_ever_with_a_short_limit, marks=pytest.mark.long),
        pytest.param("tcp", 0, reduces_for_ever_with_a_short_limit, marks=pytest.mark.long),
        pytest.param("shm", 1, passes_messages_for_ever, marks=pytest.mark.long),
    ],
)
def test_a_frozen_rank_is_named_by_all_others_within_the_limit(backend, victim, body):
    with RankProcesses(body, 3, backend) as ranks:
        for rank in range(3):
            ranks.hear(rank, "under_way")
        frozen = ranks.signal(victim, signal.SIGSTOP)
        for rank in survivors_of(ranks, victim):
            end = ranks.hear(rank, "ended")
            assert (end["ended"], end["text"].split(" for ")[0]) == ("PeerStalled", f"rank {victim} did not take part")
            assert LIMIT_S - 0.2 < end["at"] - frozen < STALLED_S
            assert ranks.code(rank) == 4
        woken = ranks.signal(victim, signal.SIGCONT)
        end = ranks.hear(victim, "ended")
        assert end["ended"] in ("PeerStalled", "PeerLost")
        assert end["at"] - woken < LIMIT_S
        assert ranks.code(victim) == 4
        assert_nothing_left(ranks)


@backends
def test_a_rank_that_raises_fails_the_others_with_its_reason(backend):
    with RankProcesses(raises_on_rank_1, 3, backend) as ranks:
        for rank in (0, 2):
            end = ranks.hear(rank, "ended")
            assert (end["ended"], end["text"]) == ("PeerLost", "rank 1 left with ValueError: boom at step 3")
            assert ranks.code(rank) == 4
        assert ranks.hear(1, "ended")["ended"] == "ValueError"
        assert ranks.code(1) == 1
        assert_nothing_left(ranks)


@pytest.mark.parametrize("backend", ["shm", *(pytest.param(b, marks=pytest.mark.long) for b in ("tcp", "tcp-ring"))])
def test_ranks_that_wait_leave_the_processor_to_others(backend):
    with RankProcesses(waits_for_a_slow_rank_1, 4, backend) as ranks:
        for rank in (0, 2, 3):
            said = ranks.hear(rank, "cpu")
            assert said["wall"] > 0.9 * SLOW_S
            assert said["cpu"] < WAITING_CPU * said["wall"]
            assert ranks.hear(rank, "ended")["ended"] == "well"


def test_the_helper_ends_ranks_that_hang():
    with RankProcesses(reduces_for_ever, 2, "tcp") as ranks:
        ranks.hear(0, "under_way")
        ranks.signal(1, signal.SIGSTOP)
    begin = time.monotonic()
    assert [ranks.code(rank) for rank in range(2)] == [-signal.SIGKILL] * 2
    assert time.monotonic() - begin < DEADLINE_S
