"""What does not go together under modes other than sync is refused."""

from __future__ import annotations

import pytest

from common.errors import LayoutMismatch, ProtocolError, UsageError
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.store.modes import ASYNC, SYNC, Mode
from tests.support.relaxed_sessions import GEO, SSP, relaxed
from tests.support.sessions import errors_of, failure_of, make_arena, serving


@pytest.mark.parametrize(
    ("modes", "text"),
    [
        ([SSP, ASYNC], "--mode ssp:2 against async"),
        ([SYNC, GEO], "--mode sync against geo:3"),
        ([SSP, Mode("ssp", 3)], "--mode ssp:2 against ssp:3"),
    ],
)
def test_all_must_ask_for_the_same_mode(modes: list[Mode], text: str) -> None:
    def on_rank(rank: int) -> None:
        with Client([server.address], rank, 2, mode=modes[rank]) as client:
            client.register(make_arena(rank), SGD())

    with serving(2) as (server,):
        errors = [*errors_of(2, on_rank), failure_of(server)]
    for error in errors:
        assert isinstance(error, LayoutMismatch)
        both = [text, " against ".join(reversed(text.removeprefix("--mode ").split(" against ")))]
        assert any(f"disagree: {'' if each == text else '--mode '}{each}; give all" in str(error) for each in both)


@relaxed
def test_other_modes_need_the_optimizer(mode: Mode) -> None:
    text = f"^mode {mode} needs the optimizer when the training begins; use mode sync$"
    with serving(1) as (server,), Client([server.address], 0, 1, mode=mode) as client:
        arena = make_arena(0)
        with pytest.raises(UsageError, match=text):
            client.register(arena, None)


@relaxed
def test_averages_are_for_sync_mode(mode: Mode) -> None:
    def body(rank: int) -> None:
        with Client([server.address], rank, 1, mode=mode) as client:
            client.register(arena := make_arena(rank), SGD())
            for bucket in range(len(arena.buckets)):
                client.push(bucket)
            client.average()

    with serving(1) as (server,):
        (error,) = errors_of(1, body)
    assert isinstance(error, ProtocolError)
    assert str(error) == "rank 0 asked for more than an update at step 0, which only sync mode has"


@pytest.mark.parametrize(
    ("mode", "step", "text"),
    [
        (SYNC, 0, "rank 0 asked for parameters at step 0, which come unasked in sync mode"),
        (ASYNC, 1, "rank 0 sent step 1, it is at step 0"),
    ],
)
def test_a_pull_out_of_turn_is_refused(mode: Mode, step: int, text: str) -> None:
    def body(rank: int) -> None:
        with Client([server.address], rank, 1, mode=mode) as client:
            client.register(make_arena(rank), SGD())
            client._steps.step = step
            client.pull()

    with serving(1) as (server,):
        (error,) = errors_of(1, body)
    assert isinstance(error, ProtocolError)
    assert str(error) == text
