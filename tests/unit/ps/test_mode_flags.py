"""Modes have names and numbers; flags make a mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.errors import UsageError
from ps.command_flags import RunConfig, TrainerConfig
from ps.store.modes import ASYNC, SYNC, Mode, parse_mode
from tests.support.relaxed_sessions import SSP


@pytest.mark.parametrize(
    ("text", "mode", "staleness"),
    [
        ("sync", Mode("sync"), 0),
        ("ssp", Mode("ssp", 2), 2),
        ("ssp:0", Mode("ssp", 0), 0),
        ("ssp:7", Mode("ssp", 7), 7),
        ("async", Mode("async"), None),
        ("geo", Mode("geo", 4), None),
        ("geo:1", Mode("geo", 1), None),
    ],
)
def test_modes_have_names_and_numbers(text: str, mode: Mode, staleness: int | None) -> None:
    assert parse_mode(text) == mode == parse_mode(str(mode))
    assert (mode.staleness, mode.in_step) == (staleness, text in ("sync", "ssp:0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("asink", r"unknown mode 'asink'; did you mean 'async'\? \(known: sync, ssp, async, geo\)"),
        ("sync:1", "not a mode: 'sync:1'; expected sync, ssp:S, async or geo:K, as in ssp:2"),
        ("ssp:-1", "not a mode: 'ssp:-1'"),
        ("ssp:1001", r"--staleness must be in 0\.\.1000 \(got 1001\)"),
        ("geo:0", r"--local-steps must be in 1\.\.1000000000 \(got 0\)"),
    ],
)
def test_what_is_no_mode_is_said_so(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        parse_mode(text)


@pytest.mark.parametrize("kind", [TrainerConfig, RunConfig])
def test_flags_make_a_mode(kind: Callable[..., TrainerConfig | RunConfig]) -> None:
    assert kind().consistency == SYNC
    assert kind(mode="ssp").consistency == SSP
    assert kind(mode="ssp", staleness=0).consistency == Mode("ssp", 0)
    assert kind(mode="async").consistency == ASYNC
    assert kind(mode="geo", local_steps=9).consistency == Mode("geo", 9)
    for flags, text in (
        ({"mode": "sps"}, "unknown mode 'sps'; did you mean 'ssp'"),
        ({"staleness": 1}, r"^--staleness is for --mode ssp \(got --mode sync\)$"),
        ({"mode": "ssp", "local_steps": 1}, r"^--local-steps is for --mode geo \(got --mode ssp\)$"),
        ({"mode": "geo", "local_steps": 0}, "^--local-steps must be in 1"),
        ({"mode": "ssp", "staleness": -1}, "^--staleness must be in 0"),
    ):
        with pytest.raises(UsageError, match=text):
            kind(**flags)


def test_a_data_port_is_for_data_connections() -> None:
    RunConfig(data_port=9000)
    RunConfig(data_port=9000, data_plane="tcp")
    with pytest.raises(UsageError, match=r"^--data-port is for --data-plane tcp \(got --data-plane shm\)$"):
        RunConfig(data_port=9000, data_plane="shm")


def test_a_script_is_trained_in_sync_mode_only() -> None:
    RunConfig().check_script(["train.py"], [])
    RunConfig(mode="async").check_script([], [])
    text = "^--mode async is for the built-in trainer so far; train.py can be trained in mode sync only$"
    with pytest.raises(UsageError, match=text):
        RunConfig(mode="async").check_script(["train.py"], ["--mode", "async"])
