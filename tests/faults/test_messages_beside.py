"""Row 7, of messages that belong to no step: signs of life, who waits for whom, room for more between trainers, and
that the group has failed. Either all have the right bytes, or all end with an error that says why not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

pytest.importorskip("paddle")

from benchmarks.faults.interceptor import FATES, Interceptor
from common.errors import GradSyncError, PeerLost, StaleEpoch
from common.tensors.arena import Arena
from ps.client.client import Client
from ps.planes.parcels import ROOM_BYTES
from tests.faults.test_messages import LEAVING, NAMED, judge, patience, second_epoch
from tests.support.commands import until
from tests.support.groups import Outcome, outcomes_of
from tests.support.sessions import as_trainer, expected_after, failure_of, make_arena, serving, take_step

__all__ = ["second_epoch"]

SOON_S = 2.0  # the timeout of who asks for signs of life, ten times as often
MESSAGES = 4  # of half the room each
SIGNS = ("alive", "server's alive")
TALK = ("awaiting", "taken", "server's taken")
WITHOUT_EPOCH = "server's taken"  # nobody looks at it: a new epoch has a new connection
FAILED = "server's failure"
Body = Callable[[Client, Arena], bytes]


def trained(body: Body, timeout: float) -> list[Outcome[bytes]]:
    with serving(2, timeout=timeout) as (server,):
        return outcomes_of(2, lambda rank: as_trainer([server.address], rank, 2, body, timeout=timeout))


@pytest.mark.parametrize(("kind", "fate"), [*product(SIGNS, FATES[:-1])])
def test_a_sign_of_life(kind: str, fate: str) -> None:
    """One of many: who asks or answers does so again."""

    def body(client: Client, arena: Arena) -> bytes:
        if client.rank == 0:
            until(lambda: interceptor.struck, "the other to have waited")
        take_step(client, arena)
        return arena.parameters.tobytes()

    with Interceptor(kind, fate) as interceptor:
        outcomes = trained(body, SOON_S)
    judge(outcomes, [expected_after(1, 2, make_arena(0)).tobytes()] * 2, fate, missed=False)


def messages(number: int) -> bytes:
    return bytes([number]) * (ROOM_BYTES // 2)


@pytest.mark.parametrize(("kind", "fate"), [*product(TALK, FATES)])
def test_of_messages_between_trainers(kind: str, fate: str) -> None:
    """More of them than there is room for at a time, and one that is waited for."""

    def body(client: Client, arena: Arena) -> bytes:
        heard = b""
        if client.rank == 0 and kind == "awaiting":
            until(lambda: interceptor.struck, "the other to have waited")
        for number in range(MESSAGES):
            if client.rank == 0:
                client.messenger.send(1, 0, messages(number))
            else:
                heard += client.messenger.receive(0, 0)
        take_step(client, arena)  # so that each hears of what has become of the other
        return heard

    with Interceptor(kind, fate) as interceptor:
        outcomes = trained(body, patience(fate))
    assert interceptor.struck
    right = [b"", b"".join(map(messages, range(MESSAGES)))]
    if fate == "of an old epoch" and kind != WITHOUT_EPOCH:
        judge(outcomes, right, fate, missed=True)
        assert any(isinstance(each.error, StaleEpoch) for each in outcomes)
    else:
        told = LEAVING if fate == "doubled" else "overtaken"  # the second one perhaps when the other has left
        judge(outcomes, right, told, missed=True)


@pytest.mark.parametrize("fate", FATES[:-1])
def test_that_the_group_has_failed(fate: str) -> None:
    """The first to be told is the one that goes on."""

    def body(client: Client, arena: Arena) -> bytes:
        take_step(client, arena)
        if client.rank == 1:
            raise ArithmeticError("of its own")
        take_step(client, arena)
        return b""

    with serving(2, timeout=patience(fate)) as (server,), Interceptor(FAILED, fate) as interceptor:
        outcomes = outcomes_of(2, lambda rank: as_trainer([server.address], rank, 2, body, timeout=patience(fate)))
        assert interceptor.struck
        assert isinstance(failure_of(server), PeerLost)
    survivor, culprit = outcomes[0].error, outcomes[1].error
    assert isinstance(survivor, NAMED)
    assert isinstance(survivor, GradSyncError)
    assert isinstance(culprit, ArithmeticError)
    if fate in ("doubled", "delayed"):
        assert "rank 1 left at step 1 with ArithmeticError: of its own" in str(survivor)
