"""Flags of a configuration and the environment of Paddle's launcher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.launch.flags import TrainingConfig
from common.launch.ranks import abstract_address, endpoints_of, flags_of, paddle_environment
from tests.support.jobs import Flags


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Flags(), []),
        (Flags(name="b c"), ["--name", "b c"]),
        (Flags(hidden_size=4), ["--hidden-size", "4"]),
        (Flags(fast=True, slow=False), ["--fast", "--no-slow"]),
        (Flags(path=Path("/x")), ["--path", "/x"]),
    ],
)
def test_flags_table(config: Flags, expected: list[str]) -> None:
    assert flags_of(config) == expected


def test_flags_left_out() -> None:
    assert flags_of(Flags(name="b", hidden_size=4), without=("hidden_size",)) == ["--name", "b"]


@pytest.mark.parametrize(
    "config",
    [
        TrainingConfig(),
        TrainingConfig(model="mlp:8,8", batch_size=7, steps=11, lr=1e-05, overlap=False, json=Path("a b.json")),
        TrainingConfig(dataset="mnist", data_dir=Path("/d"), epochs=2, optimizer="sgd", lr=0.1 + 0.2, timeout=1e9),
    ],
)
def test_flags_make_the_same_configuration_again(config: TrainingConfig) -> None:
    tyro = pytest.importorskip("tyro")
    assert tyro.cli(TrainingConfig, args=flags_of(config)) == config


def test_abstract_addresses_differ() -> None:
    addresses = {abstract_address("ring") for _ in range(100)}
    assert len(addresses) == 100
    assert all(re.fullmatch(r"unix-abstract:gradsync-ring-[0-9a-f]{16}", address) for address in addresses)


def test_the_environment_of_paddles_launcher() -> None:
    endpoints = endpoints_of(["127.0.0.1"], 3)
    assert paddle_environment(1, endpoints) == {
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "3",
        "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:6170,127.0.0.1:6171,127.0.0.1:6172",
        "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:6171",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_RANK_IN_NODE": "1",
        "PADDLE_NNODES": "1",
    }


def test_the_environment_on_the_second_of_two_hosts() -> None:
    endpoints = endpoints_of(["10.0.0.1", "fe80::2"], 2)
    assert endpoints == ("10.0.0.1:6170", "10.0.0.1:6171", "[fe80::2]:6170", "[fe80::2]:6171")
    environment = paddle_environment(3, endpoints, nnodes=2)
    assert environment["PADDLE_TRAINER_ID"] == "3"
    assert environment["PADDLE_CURRENT_ENDPOINT"] == "[fe80::2]:6171"
    assert environment["PADDLE_LOCAL_RANK"] == "1"
    assert environment["PADDLE_NNODES"] == "2"
