"""What a launcher says and does about ranks of a user's program that do not join their group."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import collective.run
import ps.run
from common.errors import RendezvousError
from common.launch.child import Child, ProcessFailed
from common.launch.joining import Joining
from common.paddle_api.fleet_api import FleetApi
from common.sync.local import LocalSynchronizer
from common.system.leftovers import Session
from common.system.process import JOINED_VARIABLE, note_joining
from ps.client.client import Client


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a rank that has or has not ended, and has joined a group of so many."""

    def make(number: int, code: int | None, joined: int | None = None) -> Child:
        process: Any = SimpleNamespace(poll=lambda: code)
        child = Child(f"rank {number}", process, Session(0, None), None, tmp_path, tmp_path / str(number))
        if joined:
            monkeypatch.setenv(JOINED_VARIABLE, str(child.joined))
            note_joining(joined)
        return child

    return make


def test_who_has_not_joined_in_time_is_named_once_and_goes_on(rank: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [rank(0, None, 3), rank(1, None), rank(2, None)]
    Joining(["mine.py"], "ps", 3, 600.0).look(ranks)
    assert capsys.readouterr().err == ""
    joining = Joining(["mine.py"], "ps", 3, 0.0)
    joining.look(ranks)
    joining.look(ranks)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ps.run: 0 s have passed (--timeout) without rank 1, 2 joining the group")
    assert "call init_parallel_env() or fleet.init(), with --no-install those of ps" in line


def test_nothing_is_said_of_ranks_that_have_joined(rank: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Joining(["mine.py"], "collective", 2, 0.0).look([rank(0, None, 2), rank(1, 0, 2)])
    assert capsys.readouterr().err == ""


def test_who_has_ended_without_joining_is_named_at_once_if_others_wait(rank: Any) -> None:
    joining = Joining(["mine.py"], "collective", 2, 600.0)
    gone = rank(1, 0)
    joining.look([rank(0, None), gone])  # it may end likewise
    joining.look([rank(0, None, 1), gone])  # a group of its own
    with pytest.raises(RendezvousError, match=r"rank 1 ended with exit code 0 without joining .*: rank 0 would wait"):
        joining.look([rank(0, None, 2), gone])


def test_launchers_flags_after_a_script_that_did_not_understand_them_are_named(rank: Any) -> None:
    script = ["mine.py", "--trainers", "2", "--nproc_per_node=2", "--mode", "--lr"]
    joining = Joining(script, "ps", 2, 600.0, flags=ps.run.FLAGS)
    note = joining.note_on(2, [rank(0, 2), rank(1, None)])
    assert note.startswith("ps.run: mine.py was given --trainers, --nproc-per-node, which")
    assert str(ProcessFailed("rank 0 ended", 2).with_note(note)) == f"rank 0 ended\n{note}"
    assert joining.note_on(1, [rank(0, 1)]) == ""  # it failed for another reason
    assert joining.note_on(2, [rank(0, 2), rank(2, None, 2)]) == ""  # they were understood
    assert Joining(["mine.py", "2"], "ps", 2, 600.0, flags=ps.run.FLAGS).note_on(2, [rank(0, 2)]) == ""


def test_launchers_flags_are_those_that_go_with_a_script() -> None:
    both = {
        "--nranks",
        "--timeout",
        "--overlap",
        "--no-overlap",
        "--gpus",
        "--devices",
        "--insecure",
        "--token-file",
        "--tls-cert",
        "--trace",
        "--log-dir",
    }
    for flags in (ps.run.FLAGS, collective.run.FLAGS):
        assert both <= flags
        assert not flags & {"--epochs", "--mode", "--staleness", "--shard-optimizer", "--hosts"}


def test_all_ways_to_join_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOINED_VARIABLE, str(tmp_path / "joined"))
    collective.connect(0, 1, "unix-abstract:alone").close()
    Client((), 0, 1).close()
    surface = FleetApi("ps", lambda _: LocalSynchronizer())
    surface.init()
    surface.leave()
    assert (tmp_path / "joined").read_text() == "1\n1\ncomplete\n1\n"


def test_a_process_of_no_launcher_notes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOINED_VARIABLE, raising=False)
    note_joining(2)


def test_servers_are_needless_where_every_rank_has_ended_well_without_joining(
    rank: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    joining = Joining(["mine.py"], "ps", 2, 600.0)
    joined, failed, running, well = rank(0, 0, 2), rank(1, 1), rank(2, None), rank(3, 0)
    assert [joining.needless([well, other]) for other in (joined, failed, running)] == [False] * 3
    assert not joining.needless([])
    assert capsys.readouterr().err == ""
    assert joining.needless([well, rank(4, 0)])
    assert capsys.readouterr().err.startswith("ps.run: no rank of mine.py joined the group: they ran apart")
