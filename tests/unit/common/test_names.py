"""The table of names against the installed Paddle, the schemes, and what is said of a name that they do not have."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest

import collective
import ps
from common.paddle_api.names import PASSED_ON, PUBLIC, SERVER_SIDE, entry_of, groups_of, why_refused
from common.paddle_api.names_table import DISTRIBUTED, FLEET, TABLE, Source, State

COMING: tuple[str, ...] = ()
NOT_IN_PADDLE_3_3 = {"all_to_all"}  # another name of `alltoall`
INTERNAL = {"monkey_patch_value_in_dist"}  # public by its name only

SCHEMES = pytest.mark.parametrize("scheme", [collective, ps], ids=["collective", "ps"])


def names_in(module: str) -> list[str]:
    return [name for group in groups_of(module) for name in group.names]


@pytest.mark.parametrize("module", [DISTRIBUTED, FLEET])
def test_every_public_name_of_the_installed_paddle_is_in_the_table(module: str) -> None:
    """A release with new names turns this red: add a line to common/paddle_api/names_table.py for each."""
    pytest.importorskip("paddle")
    paddles = import_module(module)
    public = {n for n, v in vars(paddles).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    public |= set(paddles.__all__)
    assert public - INTERNAL - set(names_in(module)) == set()
    assert {name for name in names_in(module) if not hasattr(paddles, name)} <= NOT_IN_PADDLE_3_3


def test_each_module_has_a_name_once_and_words_in_both_languages() -> None:
    assert {group.module for group in TABLE} == {DISTRIBUTED, FLEET}
    for module in (DISTRIBUTED, FLEET):
        names = names_in(module)
        assert sorted(set(names)) == sorted(names)
    for group in TABLE:
        assert bool(group.words) == bool(group.chinese) == (group.state is not State.WORKS)
        assert (group.source is Source.NOBODY) == (group.state is State.REFUSED)
        assert group.words[-1:] in ("", ".")
        assert group.chinese[-1:] in ("", "。")


@SCHEMES
def test_all_that_works_is_there(scheme: ModuleType) -> None:
    pytest.importorskip("paddle")
    there = {*PUBLIC, *PASSED_ON, *(SERVER_SIDE if scheme is ps else ())} - set(COMING)
    assert [name for name in sorted(there) if getattr(scheme, name, None) is None] == []
    assert {*PUBLIC, *PASSED_ON} <= set(dir(scheme))


def test_what_is_said_to_come_is_not_there_yet() -> None:
    """So that the list does not outlive its reason."""
    pytest.importorskip("paddle")
    assert [name for name in COMING if hasattr(collective, name)] == []


@SCHEMES
def test_both_schemes_export_the_same_names(scheme: ModuleType) -> None:
    assert set(scheme.__all__) >= set(PUBLIC)
    assert {"DataParallel", "all_reduce", "barrier_worker", "init", "send", "util"} <= set(PUBLIC)
    assert (set(SERVER_SIDE) <= set(scheme.__all__)) is (scheme is ps)
    assert set(SERVER_SIDE) & set(PUBLIC) == set()


@SCHEMES
def test_what_needs_no_group_is_paddles_own(scheme: ModuleType) -> None:
    paddle = pytest.importorskip("paddle")
    assert scheme.Shard is paddle.distributed.Shard
    assert scheme.utils is paddle.distributed.fleet.utils
    assert scheme.fleet.ParallelMode is paddle.distributed.ParallelMode


@SCHEMES
def test_fleet_is_a_part_of_each(scheme: ModuleType) -> None:
    pytest.importorskip("paddle")
    fleet = scheme.fleet
    assert fleet.init == scheme.init
    assert isinstance(fleet.fleet, fleet.Fleet)
    assert isinstance(fleet, scheme.Fleet)
    assert not isinstance(1, scheme.Fleet)
    assert scheme.Fleet() is fleet.fleet


@SCHEMES
@pytest.mark.parametrize("name", [n for g in TABLE if g.state is State.REFUSED for n in g.names])
def test_a_name_that_is_not_supported_gets_what_the_table_says(scheme: ModuleType, name: str) -> None:
    entry = entry_of(name)
    assert entry is not None
    with pytest.raises(AttributeError) as raised:
        getattr(scheme, name)
    begin = f"module '{scheme.__name__}' has no attribute '{name}': {entry.module}.{name} is not supported. "
    assert str(raised.value) == begin + why_refused(name)


def test_a_ring_says_who_has_what_it_has_not() -> None:
    with pytest.raises(
        AttributeError, match=r"has no attribute 'init_worker': It is for .*: run the program with ps\.$"
    ):
        _ = collective.init_worker


def test_of_a_name_of_both_modules_paddle_distributeds_comes_first() -> None:
    found = entry_of("all_reduce")
    assert found is not None
    assert (found.module, found.state) == (DISTRIBUTED, State.WORKS)
    fleets = entry_of("all_reduce", FLEET)
    assert fleets is not None
    assert fleets.state is State.DIFFERS
    assert entry_of("nothing") is None
    assert why_refused("all_reduce") == why_refused("nothing") == ""


def test_a_name_that_the_installed_paddle_lacks_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    paddle = pytest.importorskip("paddle")
    monkeypatch.delattr(paddle.distributed, "create_nccl_config")
    with pytest.raises(AttributeError, match=r"the installed Paddle has no paddle\.distributed\.create_nccl_config$"):
        _ = collective.create_nccl_config
