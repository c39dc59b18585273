"""Row 7: a message is lost, comes twice, late, after the next one, or from an epoch before. Either all have the bits of
the undisturbed run, or all end with an error that says so; in real connections, on threads."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import numpy as np
import pytest

pytest.importorskip("paddle")

import collective
from benchmarks.faults.interceptor import FATES, RPC_FATES, Interceptor
from collective.group import Group
from common.errors import (
    LayoutMismatch,
    PeerLost,
    PeerStalled,
    PeerUnreachable,
    ProtocolError,
    RendezvousError,
    StaleEpoch,
)
from common.launch.ranks import abstract_address
from common.network import rpc
from common.system.process import RESTARTS_VARIABLE
from common.tensors.arena import Arena
from ps.client.client import Client
from ps.status import ask
from tests.support.groups import Outcome, outcomes_of, sample
from tests.support.sessions import as_trainer, expected_after, failure_of, make_arena, serving, take_step

STEPS, TIMEOUT_S, PATIENT_S = 3, 0.5, 20.0
LEAVING = "goodbye"  # by who is still there then some may fail and others not
LATE = "doubled, the second one perhaps when all is over"
NAMED = (PeerStalled, PeerLost, ProtocolError, LayoutMismatch, RendezvousError)
STEPPING = ("gradients", "commit", "server's served")
SENT = (*STEPPING, "server's parameters")
OVER_GRPC = ("hello", "register", "parameters", "gather", "parcel", "goodbye", "server's plane", "server's gathered")
KINDS = {"grpc": (*SENT, *OVER_GRPC, "server's parcel"), "tcp": SENT, "shm": STEPPING}
NOT_MISSED = {  # what is lost, or comes twice or late, and nobody need say so
    ("goodbye", "doubled"),  # nothing that follows it is read
    ("goodbye", "of an old epoch"),  # only the server hears that
    ("server's plane", "doubled"),
    ("server's plane", "overtaken"),
    ("server's gathered", "doubled"),
}


def patience(fate: str) -> float:
    """The timeout: short where somebody waits in vain."""
    return TIMEOUT_S if "lost" in fate or fate == "overtaken" else PATIENT_S


def train(client: Client, arena: Arena) -> bytes:
    """What a trainer has at the end; there is a message of every kind."""
    take_step(client, arena)
    gathered = client.all_gather(np.array([client.rank]))
    heard = [b"first", b"second"]
    for each in heard:
        if client.rank == 0:
            client.messenger.send(1, 0, each)
        else:
            assert client.messenger.receive(0, 0) == each
    assert gathered.tolist() == [[0], [1]]
    for _ in range(STEPS - 1):  # so that each hears of what has become of the other
        take_step(client, arena)
    return arena.parameters.tobytes()


def judge(
    outcomes: list[Outcome[bytes]],
    right: list[bytes],
    fate: str,
    *,
    missed: bool,
    named: tuple[type[Exception], ...] = NAMED,
) -> None:
    """Whether all are right, or all have said why not."""
    errors = [each.error for each in outcomes]
    if fate == "delayed" or not missed:
        assert errors == [None] * len(outcomes)
    elif fate == LEAVING:
        assert all(error is None or isinstance(error, named) for error in errors), errors
    elif fate not in ("overtaken", LATE) or any(errors):
        assert all(isinstance(error, named) for error in errors), errors
    if fate == "of an old epoch" and missed:
        assert any(isinstance(error, (StaleEpoch, RendezvousError)) for error in errors), errors
    for each, expected in zip(outcomes, right, strict=True):
        assert each.error or each.value == expected


@pytest.fixture(autouse=True)
def second_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "1")


QUICK = [("grpc", "server's parameters", "lost"), ("tcp", "gradients", "doubled"), ("grpc", "parcel", "doubled")]
WITHOUT_EPOCH = ("grpc", "server's plane", "of an old epoch")
ALL = [each for plane, kinds in KINDS.items() for each in product((plane,), kinds, FATES) if each != WITHOUT_EPOCH]


@pytest.mark.parametrize(
    ("plane", "kind", "fate"),
    [pytest.param(*each, marks=[pytest.mark.quick] if each in QUICK else []) for each in ALL],
)
def test_at_servers(plane: str, kind: str, fate: str) -> None:
    right = expected_after(STEPS, 2, make_arena(0)).tobytes()
    with serving(2, timeout=patience(fate)) as (server,):
        options = {"data_plane": plane, "timeout": patience(fate)}
        with Interceptor(kind, fate) as interceptor:
            outcomes = outcomes_of(2, lambda rank: as_trainer([server.address], rank, 2, train, **options))
        assert interceptor.struck
        told = LEAVING if kind == LEAVING and fate in ("lost", "overtaken") else fate
        judge(outcomes, [right] * 2, told, missed=(kind, fate) not in NOT_MISSED)
        assert server.steps <= STEPS
        if (kind, fate) == ("goodbye", "of an old epoch"):  # its trainer has gone
            assert isinstance(failure_of(server), StaleEpoch)


@pytest.mark.parametrize("fate", RPC_FATES)
def test_joining_a_server(fate: str) -> None:
    right = expected_after(STEPS, 2, make_arena(0)).tobytes()
    with serving(2, timeout=patience(fate)) as (server,), Interceptor("Join", fate) as interceptor:
        outcomes = outcomes_of(2, lambda rank: as_trainer([server.address], rank, 2, train, timeout=patience(fate)))
    assert interceptor.struck
    judge(outcomes, [right] * 2, LATE if fate == "doubled" else fate, missed=True)


def status_of(address: str) -> object:
    with rpc.connect(address, timeout=TIMEOUT_S) as channel:
        return ask([address], [channel], TIMEOUT_S)


@pytest.mark.parametrize(("method", "fate"), [*product(("Status", "Trace"), RPC_FATES[:-1])])
def test_who_asks_a_server_disturbs_nobody(method: str, fate: str) -> None:
    """They name no epoch, and change nothing."""

    def body(client: Client, arena: Arena) -> bytes:
        if client.rank == 0:
            try:
                (session,) = client._servers.sessions
                trace = partial(session.ask, events=False, timeout=TIMEOUT_S)
                told = trace() if method == "Trace" else status_of(server.address)
                assert told
                assert "lost" not in fate
            except PeerStalled:
                assert "lost" in fate
        return train(client, arena)

    right = expected_after(STEPS, 2, make_arena(0)).tobytes()
    with serving(2) as (server,), Interceptor(method, fate) as interceptor:
        outcomes = outcomes_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
    assert interceptor.struck
    judge(outcomes, [right] * 2, fate, missed=False)


RING_CALLS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
NRANKS = 3


def calls_of(group: Group) -> bytes:
    mine = [sample(group.rank, 60_000, "float32", seed=seed) for seed in range(3)]
    group.all_reduce(mine[0], "mean")
    scattered = group.reduce_scatter(mine[1], "sum")
    gathered = group.all_gather(np.array([group.rank]))
    group.broadcast(mine[2], 1)
    group.barrier()
    group.all_reduce(mine[0], "mean")
    group.barrier()
    return b"".join(np.ascontiguousarray(each).tobytes() for each in (mine[0], scattered, gathered, mine[2]))


def in_a_ring(algorithm: str, timeout: float) -> list[Outcome[bytes]]:
    place = abstract_address("test")

    def body(rank: int) -> bytes:
        options = {"algorithm": algorithm, "timeout": timeout, "wait_limit": timeout}
        with collective.connect(rank, NRANKS, place, "tcp", **options) as group:
            return calls_of(group)

    return outcomes_of(NRANKS, body)


@cache
def undisturbed(algorithm: str) -> list[bytes]:
    return [each.value or b"" for each in in_a_ring(algorithm, PATIENT_S)]


@pytest.mark.parametrize(("algorithm", "call", "fate"), [*product(("ring", "direct"), RING_CALLS, FATES)])
def test_in_a_ring(algorithm: str, call: str, fate: str) -> None:
    with Interceptor(call, fate) as interceptor:
        outcomes = in_a_ring(algorithm, patience(fate))
    assert interceptor.struck
    judge(outcomes, undisturbed(algorithm), fate, missed=True)


@pytest.mark.parametrize("fate", RPC_FATES)
def test_meeting_of_a_ring(fate: str) -> None:
    with Interceptor("Join", fate) as interceptor:
        outcomes = in_a_ring("ring", patience(fate))
    assert interceptor.struck
    told = LATE if fate == "doubled" else fate
    named = (*NAMED, PeerUnreachable)  # by who comes when rank 0, where all meet, has been refused and left
    judge(outcomes, undisturbed("ring"), told, missed=True, named=named)
