"""Every parser of what others send: a few inputs each here, 100,000 by `make fuzz`; what once broke one is replayed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz import handshakes, objects, ring, servers
from tests.fuzz.target import CORPUS, Target, found_before

FEW = 25
ALL = {target.name: target for target in (*handshakes.TARGETS, *ring.TARGETS, *servers.TARGETS, *objects.TARGETS)}
REPLAYED = [(name, path) for name in ALL for path in found_before(name)]


@pytest.mark.parametrize("target", ALL.values(), ids=ALL)
def test_only_named_errors_whatever_is_sent(target: Target) -> None:
    @settings(
        max_examples=int(os.environ.get("GRADSYNC_FUZZ_INPUTS", FEW)),
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def check(data: bytes) -> None:
        target.check(data)

    check()


@pytest.mark.parametrize("target", ALL.values(), ids=ALL)
def test_what_is_valid_is_taken(target: Target) -> None:
    """Else fuzzing would only ever see the first check: some of the seeds get through all of them."""
    taken = 0
    for seed in target.seeds:
        try:
            target.parse(seed)
        except target.errors:
            continue
        taken += 1
    assert taken


@pytest.mark.parametrize(("name", "path"), REPLAYED, ids=[f"{name}/{path.name}" for name, path in REPLAYED])
def test_what_broke_a_parser_once_does_not_again(name: str, path: Path) -> None:
    ALL[name].check(path.read_bytes())


def test_every_kept_input_is_of_a_parser() -> None:
    assert {each.name for each in CORPUS.iterdir() if each.is_dir()} <= set(ALL)
