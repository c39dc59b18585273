"""Jobs with `--max-restarts` whose processes are killed or frozen: the bits of the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytest.importorskip("paddle")

from common.system.fault_points import FAULT_VARIABLE
from tests.support.commands import JOB, Started, digest_in
from tests.support.groups import free_port
from tests.support.warm import COLD_VARIABLE

pytestmark = pytest.mark.processes
STEPS = 6
Run = Callable[..., tuple[str, Started]]


@pytest.fixture
def run(tmp_path: Path, start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A training with faults: its digest, and what it was."""

    def run(command: str, faults: str, *flags: object) -> tuple[str, Started]:
        monkeypatch.setenv(FAULT_VARIABLE, faults)
        record = tmp_path / "record.json"
        started = start(command, *JOB, "--steps", STEPS, "--nranks", 2, "--json", record, *flags)
        assert started.code == 0, started.err
        return digest_in(record), started

    return run


_undisturbed: list[str] = []


def undisturbed(run: Run) -> str:
    if not _undisturbed:
        _undisturbed.append(run("collective.run", "")[0])
    return _undisturbed[0]


long = pytest.mark.long


@pytest.mark.parametrize(
    ("command", "fault", "who"),
    [
        ("collective.run", "backward:1:3", "rank 1 was killed by SIGKILL"),
        pytest.param("ps.run", "got-commit:s0:3", "server 0 was killed by SIGKILL", marks=long),
        pytest.param("ps.run", "before-reply:s0:0", "server 0", marks=long),
        pytest.param("ps.run", "stored:s0:2:stop", "PeerStalled: server 0", marks=long),
        pytest.param("collective.run", "before-reduce:0:4:stop", "PeerStalled: rank 0", marks=long),
        pytest.param("collective.run", "leaving:1:0", "rank 1 was killed", marks=long),
        pytest.param("collective.run", "backward:1:3,joined:0:0", "rank 0 was killed", marks=long),
    ],
)
def test_a_job_that_loses_a_process_ends_with_the_bits_of_one_that_does_not(
    command: str, fault: str, who: str, run: Run
) -> None:
    digest, started = run(command, fault, "--max-restarts", 2, "--timeout", 2)
    assert who in started.err
    assert f"(epoch {len(fault.split(','))})" in started.err
    assert digest == undisturbed(run)


@long
@pytest.mark.parametrize(
    ("command", "fault", "how"),
    [
        ("collective.run", "joined:1:0", "all go on after step 0, 0 steps replayed"),
        pytest.param("collective.run", "joining:1:0", "the group is complete, 0 steps", marks=pytest.mark.longest),
        ("collective.run", "introduced:1:0", "the group is complete"),
        pytest.param("ps.run", "joined:0:0", "all go on after step 0, 0 steps replayed", marks=pytest.mark.longest),
        pytest.param("ps.run", "joining:1:0", "the group is complete, 0 steps replayed", marks=pytest.mark.longest),
        pytest.param("collective.run", "leaving:1:0", "the group is complete again", marks=pytest.mark.longest),
        pytest.param("ps.run", "leaving:0:0", "the group is complete again", marks=pytest.mark.longest),
    ],
)
def test_two_hosts_go_on_together(
    command: str,
    fault: str,
    how: str,
    tmp_path: Path,
    run: Run,
    start: Callable[..., Started],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, record = undisturbed(run), tmp_path / "of two.json"
    monkeypatch.setenv(FAULT_VARIABLE, fault)
    monkeypatch.setenv(COLD_VARIABLE, "1")  # launchers that have met would fork ranks, which then could not use gRPC
    hosts = ["--nnodes", 2, "--master", f"127.0.0.1:{free_port()}", "--nproc-per-node", 1, "--max-restarts", 1]
    flags = [*JOB, "--steps", STEPS, "--json", record, *hosts]
    launchers = [start(command, *flags, "--node-rank", index) for index in (0, 1)]
    for index, launcher in enumerate(launchers):
        assert launcher.code == 0, launcher.err
        knows = index == 1 or not fault.startswith("joining")  # in which the other host has no part
        assert (f"recovered: {how}" in launcher.err) is knows
    assert digest_in(record) == expected


@long
@pytest.mark.parametrize(
    ("command", "lost"),
    [
        ("collective.run", 0),
        pytest.param("collective.run", 1, marks=pytest.mark.longest),
        pytest.param("ps.run", 1, marks=pytest.mark.longest),
    ],
)
def test_a_host_that_is_lost_is_waited_for(
    command: str,
    lost: int,
    tmp_path: Path,
    run: Run,
    start: Callable[..., Started],
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
) -> None:
    """Its launcher and its ranks are killed; a launcher with its number takes its place."""
    expected, record = undisturbed(run), tmp_path / "of two.json"
    monkeypatch.setenv(COLD_VARIABLE, "1")
    hosts = ["--nnodes", 2, "--master", f"127.0.0.1:{free_port()}", "--nproc-per-node", 1]
    commits = tmp_path / "commits"
    flags = [*JOB, "--steps", STEPS, "--json", record, *hosts, "--max-restarts", 1, "--host-wait", 60]
    flags += ["--timeout", 5, "--checkpoint-dir", commits, "--commit-every", 2]
    monkeypatch.setenv(FAULT_VARIABLE, f"backward:{lost}:4:stop")
    launchers = [start(command, *flags, "--node-rank", index) for index in (0, 1)]
    wait_until(lambda: any(is_stopped(child) for child in psutil.Process(launchers[lost].process.pid).children()), 60)
    launchers[lost].process.kill()
    monkeypatch.setenv(FAULT_VARIABLE, "")
    another = start(command, *flags, "--node-rank", lost)
    assert another.code == 0, another.err
    assert "this host joins a job that has lost one, in epoch 1" in another.err
    assert launchers[1 - lost].code == 0, launchers[1 - lost].err
    said = "recovered: all go on after step" if lost else "recovered: the group is complete again"
    assert said in launchers[1 - lost].err
    assert "in the place of one that is gone start the same command, with its --node-rank" in launchers[1 - lost].err
    assert digest_in(record) == expected


def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


@long
def test_a_job_that_cannot_be_saved_says_why(start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, "joined:1:0,joined:1:0:exit")
    started = start("collective.run", *JOB, "--steps", STEPS, "--nranks", 2, "--max-restarts", 1)
    assert started.code == 6
    assert (
        "RecoveryFailed: 1 restart did not help (--max-restarts 1); last, rank 1 ended with exit code 1" in started.err
    )


def test_a_script_that_lacks_a_module_is_started_once(tmp_path: Path, start: Callable[..., Started]) -> None:
    script = tmp_path / "lacks.py"
    script.write_text("print(__import__('os').environ['GRADSYNC_RESTARTS'], flush=True)\nimport no_such_module\n")
    started = start("collective.run", "--nranks", 2, "--max-restarts", 3, script)
    assert started.code == 1
    assert "No module named 'no_such_module'" in started.err
    assert "starting all again" not in started.err
    assert started.out.split() == ["0"]
