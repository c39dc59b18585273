"""Jobs of two hosts, emulated by a launcher each, of which a process is killed or frozen: those that live keep their
processes on both hosts, and the bits are those of the undisturbed run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

pytest.importorskip("paddle")

from common.system.fault_points import FAULT_VARIABLE
from tests.support.commands import JOB, Started, digest_in, watched
from tests.support.groups import ROOT, free_port
from tests.support.warm import COLD_VARIABLE

pytestmark = [pytest.mark.processes, pytest.mark.long]
STEPS, EACH = 40, 2
GONE_ON = r"recovered: all go on after step \d+, [01] steps? replayed, .* s after that \(epoch {}\)"
Hosts = Callable[..., "Two"]


class Two:
    """Launchers of two hosts."""

    def __init__(self, start: Callable[..., Started], command: str, flags: Sequence[object]) -> None:
        place = ["--nnodes", 2, "--master", f"127.0.0.1:{free_port()}", "--nproc-per-node", EACH]
        self._start, self._command = start, command
        self._flags = [*JOB, "--steps", STEPS, "--max-restarts", 3, *place, *flags]
        self.launchers = [self.launch(index) for index in (0, 1)]

    def launch(self, index: int) -> Started:
        return self._start(self._command, *self._flags, "--node-rank", index)

    def processes(self) -> list[int]:
        """How many each launcher has had, once both have ended well."""
        with ThreadPoolExecutor(2) as pool:
            counts = [*pool.map(watched, self.launchers)]
        assert [launcher.code for launcher in self.launchers] == [0, 0], [each.err for each in self.launchers]
        return counts


@pytest.fixture
def hosts(tmp_path: Path, start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """A training with faults; its record is at tmp_path."""
    monkeypatch.setenv(COLD_VARIABLE, "1")  # launchers that have met would fork ranks, which then could not use gRPC

    def run(command: str, faults: str, *flags: object) -> Two:
        monkeypatch.setenv(FAULT_VARIABLE, faults)
        return Two(start, command, ["--json", tmp_path / "record.json", *flags])

    return run


_undisturbed: list[str] = []


@pytest.fixture
def undisturbed(tmp_path: Path, start: Callable[..., Started]) -> str:
    """The digest of as many ranks on one host."""
    if not _undisturbed:
        record = tmp_path / "undisturbed.json"
        start("collective.run", *JOB, "--steps", STEPS, "--nranks", 2 * EACH, "--json", record).ended_well()
        _undisturbed.append(digest_in(record))
    return _undisturbed[0]


@pytest.mark.parametrize(
    ("command", "faults", "flags"),
    [
        ("collective.run", "backward:3:9,before-reduce:0:25", ()),
        pytest.param("collective.run", "before-reduce:2:5:stop", ("--timeout", 5), marks=pytest.mark.longest),
        pytest.param("collective.run", "backward:1:3,joining:1:0", (), marks=pytest.mark.longest),
        pytest.param("collective.run", "sent:0:37", ("--algorithm", "ring"), marks=pytest.mark.longest),
        pytest.param("collective.run", "backward:2:4", ("--shard-optimizer",), marks=pytest.mark.longest),
        pytest.param("ps.run", "replied:s0:9", (), marks=pytest.mark.longest),
        pytest.param("ps.run", "replied:s0:9,pushed:3:25", (), marks=pytest.mark.longest),
        pytest.param("ps.run", "committed:0:5", ("--servers", 2, "--data-plane", "grpc"), marks=pytest.mark.longest),
        pytest.param("ps.run", "stored:s1:5:stop", ("--servers", 2, "--timeout", 10), marks=pytest.mark.longest),
        pytest.param("ps.run", "pushed:1:3,joining:1:0", (), marks=pytest.mark.longest),
    ],
)
def test_who_dies_is_replaced_while_the_others_keep_their_processes(
    command: str, faults: str, flags: tuple[object, ...], tmp_path: Path, undisturbed: str, hosts: Hosts
) -> None:
    two = hosts(command, faults, *flags)
    replaced = [fault.split(":")[1] for fault in faults.split(",")]
    counts = two.processes()
    for launcher in two.launchers:
        assert "starting all again" not in launcher.err
        for number, who in enumerate(replaced, start=1):
            name = f"server {who[1:]}" if who[0] == "s" else f"rank {who}"
            assert f"; {name} is started again (restart {number} of 3), the others go on" in launcher.err
        assert re.search(GONE_ON.format(len(replaced)), launcher.err), launcher.err
    there = sum(who[0] != "s" and int(who) >= EACH for who in replaced)
    servers = 0 if command == "collective.run" else 2 if "--servers" in flags else 1
    # the guard, the ranks and servers, and those in the places of others
    assert counts == [1 + EACH + servers + len(replaced) - there, 1 + EACH + there]
    assert digest_in(tmp_path / "record.json") == undisturbed


@pytest.mark.longest
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(("command", "point"), [("collective.run", "backward"), ("ps.run", "pushed")])
def test_a_launcher_that_is_lost_while_a_rank_is_replaced(
    command: str,
    point: str,
    lost: int,
    tmp_path: Path,
    undisturbed: str,
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
) -> None:
    """All are started again, from the commit, when another one has taken its place."""
    faults, commits = f"{point}:{2 * lost}:9,joining:{2 * lost}:0:stop", tmp_path / "commits"
    two = hosts(command, faults, "--host-wait", 60, "--timeout", 10, "--checkpoint-dir", commits, "--commit-every", 2)
    kill_once_frozen(two.launchers[lost], wait_until)
    monkeypatch.setenv(FAULT_VARIABLE, "")
    two.launchers[lost] = two.launch(lost)
    another, other = two.launchers[lost], two.launchers[1 - lost]
    two.processes()
    assert "this host joins a job that has lost one, in epoch 2" in another.err
    assert f"; rank {2 * lost} is started again (restart 1 of 3), the others go on" in other.err
    assert "starting all again (restart 2 of 3)" in other.err
    assert "recovered: the group is complete again" in other.err
    assert digest_in(tmp_path / "record.json") == undisturbed


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("collective.run", ()),
        pytest.param("collective.run", ("--shard-optimizer",), marks=pytest.mark.longest),
        pytest.param("ps.run", ("--servers", 2), marks=pytest.mark.longest),
    ],
)
def test_a_host_that_is_lost_takes_no_other_process_along(
    command: str,
    flags: tuple[object, ...],
    tmp_path: Path,
    undisturbed: str,
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
) -> None:
    """Without a commit: what its ranks had alone, the other host has too."""
    two = hosts(command, "backward:3:9:stop", "--host-wait", 60, *flags)
    kill_once_frozen(two.launchers[1], wait_until)
    monkeypatch.setenv(FAULT_VARIABLE, "")
    two.launchers[1] = two.launch(1)
    counts = two.processes()
    first, another = two.launchers
    assert "; rank 2 and rank 3 are started again (restart 1 of 3), the others go on" in first.err
    assert re.search(GONE_ON.format(1), first.err), first.err
    assert "this host joins a job that has lost one, in epoch 1" in another.err
    assert re.search(r"recovered: all go on after step \d+, [01] steps? replayed \(epoch 1\)", another.err), another.err
    servers = 0 if command == "collective.run" else 2
    assert counts == [1 + EACH + servers, 1 + EACH]
    assert digest_in(tmp_path / "record.json") == undisturbed


@pytest.mark.parametrize(
    ("command", "point"),
    [("collective.run", "before-reduce"), pytest.param("ps.run", "pushed", marks=pytest.mark.longest)],
)
def test_a_program_of_ones_own_goes_on_after_the_loss_of_a_host(
    command: str,
    point: str,
    tmp_path: Path,
    start: Callable[..., Started],
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
) -> None:
    """With BatchNorm, dropout, random transforms, a schedule and a scaler: each rank ends as in an undisturbed run."""
    monkeypatch.setenv(COLD_VARIABLE, "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("RESUMED_SCHEME", command.partition(".")[0])

    def launch(what: str, *flags: object, commits: str = "commits") -> Started:
        own = [ROOT / "tests" / "programs" / "resumed.py", tmp_path / commits, 0, 3]
        return start(command, *flags, "--log-dir", tmp_path / what, *own)

    def said(*what: str) -> list[str]:
        logs = [log.read_text() for each in what for log in (tmp_path / each).glob("workerlog.*")]
        return sorted(re.findall(r"^RESULT (.*)$", "".join(logs), re.MULTILINE))

    assert launch("undisturbed", "--nranks", 2 * EACH, commits="other commits").code == 0
    place = ["--nnodes", 2, "--master", f"127.0.0.1:{free_port()}", "--nproc-per-node", EACH]
    place += ["--max-restarts", 1, "--host-wait", 60]
    monkeypatch.setenv(FAULT_VARIABLE, f"{point}:3:5:stop")
    first, second = (launch(f"host {index}", *place, "--node-rank", index) for index in (0, 1))
    kill_once_frozen(second, wait_until)
    monkeypatch.setenv(FAULT_VARIABLE, "")
    another = launch("another", *place, "--node-rank", 1)
    assert [first.code, another.code] == [0, 0], first.err + another.err
    assert re.search(GONE_ON.format(1), first.err), first.err
    assert said("host 0", "another") == said("undisturbed")
    assert len(said("undisturbed")) == 2 * EACH


def kill_once_frozen(launcher: Started, wait_until: Callable[..., None]) -> None:
    """As soon as one of its ranks is."""
    wait_until(lambda: any(is_stopped(child) for child in psutil.Process(launcher.process.pid).children()), 60)
    launcher.process.kill()


def is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
