"""What goes wrong over NCCL, and the watchdog that finds it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from collective.nccl import algorithm as nccl_algorithm
from collective.nccl.algorithm import NcclAlgorithm
from collective.nccl.binding import NcclBinding
from collective.nccl.stuck_calls import Watchdog
from common.errors import GradSyncError, NcclFailed, PeerLost, PeerStalled, ProtocolError
from common.network.patience import Patience
from tests.support.fake_nccl import FakeGpu, FakeNccl, on_gpu
from tests.support.groups import ROOT, errors_on, nccl_groups, outcomes_of
from tests.support.nccl_cases import kinds

LIMIT_S = 0.3  # where a wait is to run out


# What goes wrong


@kinds
def test_calls_that_differ_are_found_although_nccl_would_not(ring):
    """A sum on one rank and a maximum on the other: NCCL itself would go through with it."""
    errors = errors_on(
        nccl_groups(2, ring=ring), lambda group: group.all_reduce(on_gpu(np.ones(64, "f4")), ["sum", "max"][group.rank])
    )
    assert any(isinstance(error, ProtocolError) for error in errors)
    assert all(isinstance(error, (ProtocolError, PeerLost)) for error in errors)


def stuck(group, seconds=LIMIT_S):
    """The group's GPU never comes to an end, and the wait for it runs out soon."""
    group._algorithm._gpu.stuck = True
    group._algorithm._mesh.patience = Patience(seconds, 0.0)


def test_a_gpu_that_never_ends_although_all_ranks_wait_is_nccls_fault():
    fake = FakeNccl()
    groups = nccl_groups(2, ring=False, nccl=fake)
    for group in groups:
        stuck(group)
    begin = time.monotonic()
    errors = errors_on(groups, lambda group: group.all_reduce(on_gpu(np.ones(64, "f4"))))
    assert time.monotonic() - begin < LIMIT_S + 5
    failed = [str(error) for error in errors if isinstance(error, NcclFailed)]
    assert failed
    assert "NCCL did not finish all_reduce within 0.3 s although every rank waits for it (this is rank" in failed[0]
    assert all(fake.communicators[rank].aborted for rank in range(2))


def test_a_rank_that_does_not_come_is_stalled():
    """The other one is inside NCCL, so it is the watchdog that finds out."""
    groups = nccl_groups(2, ring=False)
    stuck(groups[0])

    def body(rank):
        if rank == 0:
            with groups[0] as group:
                group.all_reduce(on_gpu(np.ones(64, "f4")))

    outcomes = outcomes_of(2, body)
    groups[1].close()
    error = outcomes[0].error
    assert type(error) is PeerStalled
    assert str(error).startswith("rank 1 did not take part for 0.3 s (rank 0 was in all_reduce)")


@pytest.mark.parametrize("reason", ["", "ValueError: boom"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside NCCL", "waiting for the GPU"])
def test_a_rank_that_leaves_is_named_within_a_second_or_two(reason, inside):
    groups = nccl_groups(2, ring=False)
    if not inside:
        groups[0]._algorithm._nccl.all_reduce = lambda *arguments: None
        groups[0]._algorithm._gpu.stuck = True
    begin = time.monotonic()

    def body(rank):
        with groups[rank] as group:
            if rank == 0:
                group.all_reduce(on_gpu(np.ones(64, "f4")))
            else:
                group.close(reason)

    error = outcomes_of(2, body)[0].error
    assert time.monotonic() - begin < nccl_algorithm.EXPLAIN_S + 2
    assert type(error) is PeerLost
    expected = f"rank 1 left with {reason}" if reason else "rank 1 finished while rank 0 was in"
    assert str(error).startswith(expected)


def test_an_error_in_the_background_ends_the_wait():
    fake = FakeNccl()
    (group,) = nccl_groups(1, ring=False, nccl=fake)
    group._algorithm._gpu.stuck = True
    fake.communicators[0].asynchronous_error = "unhandled system error"
    with group, pytest.raises(NcclFailed, match="failed in the background: unhandled system error"):
        group.all_reduce(on_gpu(np.ones(3, "f4")))
    assert fake.communicators[0].aborted


def test_an_error_of_nccls_that_a_death_explains_is_that_death():
    """Although the mesh learns of the death a moment later than NCCL."""
    fake = FakeNccl()
    groups = nccl_groups(2, ring=False, nccl=fake)

    def die():
        for peer in groups[1]._algorithm._mesh.peers.values():
            peer.connection.shutdown(socket.SHUT_RDWR)

    dying = threading.Timer(0.2, die)

    def fail(*arguments):
        dying.start()
        raise NcclFailed("remote process exited")

    groups[0]._algorithm._nccl.all_reduce = fail
    with pytest.raises(PeerLost, match="rank 1 died: its connection closed without a goodbye"):
        groups[0].all_reduce(on_gpu(np.ones(3, "f4")))
    dying.join()
    followed = groups[0]._algorithm._gpu.followed
    with pytest.raises(PeerLost):  # and so for every later call, which goes no further
        groups[0].all_reduce(on_gpu(np.ones(3, "f4")))
    assert groups[0]._algorithm._gpu.followed == followed
    for group in groups:
        group.close()


def test_a_group_that_does_not_come_together_in_nccl_is_given_up():
    ended = []

    class LonelyNccl(NcclBinding):
        name, version, most_elements = "lonely", 23007, 1

        def init(self, nranks, unique_id, rank):
            deadline = time.monotonic() + 20
            while not ended and time.monotonic() < deadline:
                time.sleep(0.01)
            raise NcclFailed("aborted")

        def abort(self):
            pass

        unique_id = group_start = group_end = check = destroy = _enqueue = abort

    from collective.membership.liveness import Mesh

    with pytest.raises(NcclFailed):
        NcclAlgorithm(LonelyNccl(), FakeGpu(), Mesh(0, {}, timeout=LIMIT_S), 1, b"", end=ended.append)
    assert str(ended[0]).startswith("NCCL did not finish initialisation within 0.3 s although every rank waits for it")


# The watchdog


def test_the_watchdog_looks_only_while_a_call_lasts_and_ends_once(wait_until):
    looks, ended = [], []

    def look(doing, waited):
        looks.append((doing, waited))
        if waited > 0.1:
            raise PeerLost("rank 1 died")

    watchdog = Watchdog(look, ended.append)
    try:
        with watchdog.over("broadcast"):
            wait_until(lambda: ended)
        count = len(looks)
        with watchdog.over("another"):
            pass
        assert (str(ended[0]), len(ended)) == ("rank 1 died", 1)
        assert {doing for doing, _ in looks} == {"broadcast"}
        assert len(looks) == count
    finally:
        watchdog.close()


def test_the_end_is_one_line_and_the_errors_exit_code():
    code = (
        "from collective.nccl.stuck_calls import Watchdog, end_process\n"
        "from common.errors import PeerLost\n"
        "import time\n"
        "def look(doing, waited): raise PeerLost('rank 1 died: its connection closed without a goodbye')\n"
        "with Watchdog(look, end_process).over('all_reduce'):\n"
        "    time.sleep(30)"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - begin < 20
    assert done.returncode == PeerLost.exit_code
    assert done.stderr == (
        "PeerLost: rank 1 died: its connection closed without a goodbye; NCCL holds this process, so it ends\n"
    )


@pytest.mark.parametrize("leave", ["abort", "destroy"])
def test_leaving_that_hangs_is_given_up_with_the_error(monkeypatch, leave):
    monkeypatch.setattr(nccl_algorithm, "END_S", 0.2)
    ended = []
    fake = FakeNccl()
    (group,) = nccl_groups(1, ring=False, nccl=fake)
    algorithm = group._algorithm
    algorithm._end = ended.append

    def hang():
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)

    setattr(algorithm._nccl, leave, hang)
    if leave == "abort":
        fake.communicators[0].asynchronous_error = "unhandled system error"
        algorithm._gpu.stuck = True
        with pytest.raises(NcclFailed):
            group.all_reduce(on_gpu(np.ones(3, "f4")))
        assert "unhandled system error" in str(ended[0])
        algorithm._nccl.abort = lambda: None
    group.close()
    if leave == "destroy":
        assert str(ended[0]) == "rank 0 could not leave NCCL within 0.2 s"
    assert all(isinstance(error, GradSyncError) for error in ended)
