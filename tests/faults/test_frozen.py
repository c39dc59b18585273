"""Row 4: SIGSTOP of any process, at points of a step. Woken before the timeout it goes on, and the bits are those of
the undisturbed run. Else all others name it within the timeout and a second; with `--max-restarts` another one takes
its place; and who wakes up when a later epoch has begun is refused."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("paddle")

from common.errors import PeerStalled, StaleEpoch
from common.launch.ranks import abstract_address
from common.system.fault_points import FAULT_HERE_VARIABLE
from common.system.process import RESTARTS_VARIABLE
from tests.faults.jobs import Once, Start, end_together
from tests.faults.kills import AT, STEPS, Run, frozen_child, left_by, states_of, undisturbed, undisturbed_states
from tests.support.commands import JOB, Started, digest_in, start_server, until

TIMEOUT_S = 2.0
SHORT_S = TIMEOUT_S / 4
PATIENCE_S = 1.0  # of a trainer with its server, which knows more
WITHIN_S = TIMEOUT_S + 1.0 + PATIENCE_S + 4.0  # and for processes and the launcher to end, on a loaded machine
CASES = [
    *(("collective", "shm", point, "1") for point in ("backward", "before-reduce")),
    *(("collective", "tcp", point, "1") for point in ("sending", "receiving")),
    *(("ps", "shm", point, "1") for point in ("backward", "before-push")),
    *(("ps", "tcp", point, "1") for point in ("pushed", "before-commit")),
    *(("ps", "shm", point, "s0") for point in ("stored", "before-reply")),
    *(("ps", "tcp", point, "s0") for point in ("got-push", "replied")),
]
QUICK = ("ps", "shm", "stored", "s0")
cases = pytest.mark.parametrize(
    ("scheme", "plane", "point", "who"),
    [pytest.param(*case, marks=[pytest.mark.quick] if case == QUICK else []) for case in CASES],
)
every_case = pytest.mark.parametrize(("scheme", "plane", "point", "who"), CASES)


def fault(point: str, who: str) -> str:
    step = AT[2] if point == "receiving" else AT[1]  # of calls; rank 1 receives the third before the first step
    return f"{point}:{who}:{step}:stop"


def wake_in_time(job: Started) -> None:
    frozen = frozen_child(job)
    time.sleep(SHORT_S)
    frozen.send_signal(signal.SIGCONT)


@cases
def test_for_less_than_the_timeout_nothing_is_lost(
    scheme: str, plane: str, point: str, who: str, run: Run, once: Once
) -> None:
    flags = ["--timeout", TIMEOUT_S, "--max-restarts", 1]
    job = run(scheme, fault(point, who), *flags, plane=plane, meanwhile=wake_in_time)
    assert job.started.code == 0, job.err
    assert len(job.struck()) == 1
    assert "started again" not in job.err
    assert job.digest == undisturbed(run, once)
    assert left_by(job) == []


@every_case
def test_for_longer_all_others_name_it(scheme: str, plane: str, point: str, who: str, run: Run) -> None:
    victim = f"server {who[1:]}" if who.startswith("s") else f"rank {who}"
    job = run(scheme, fault(point, who), "--timeout", TIMEOUT_S, plane=plane, commits=False)
    (struck,) = job.struck()
    assert TIMEOUT_S < time.monotonic() - struck < WITHIN_S
    assert job.started.code == PeerStalled.exit_code, job.err
    others = {file: log for file, log in job.logs.items() if "GRADSYNC_FAULT_HERE" not in log}
    assert others
    for file, log in others.items():
        assert re.search(rf"PeerStalled: .*\b{victim}\b", log), f"{file}: {log}"
    assert left_by(job) == []


@every_case
def test_for_longer_another_takes_its_place_and_the_bits_are_the_same(
    scheme: str, plane: str, point: str, who: str, run: Run, once: Once
) -> None:
    job = run(scheme, fault(point, who), "--timeout", TIMEOUT_S, "--max-restarts", 1, plane=plane)
    assert job.started.code == 0, job.err
    assert len(job.struck()) == 1
    assert "recovered: all go on after step " in job.err
    assert job.processes == len(job.logs) + 2  # the guard, and the one in the place of another
    assert job.digest == undisturbed(run, once)
    assert states_of(job).items() <= undisturbed_states(scheme, run, once).items()
    assert left_by(job) == []


@pytest.mark.parametrize("scheme", ["ps", "collective"])
def test_who_wakes_up_in_a_later_epoch_is_refused(
    scheme: str, start: Start, run: Run, once: Once, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "1")
    if scheme == "ps":
        server, address = start_server(start, 2)
        where, servers = ["ps.trainer", "--servers", address], [server]
    else:
        where, servers = ["collective.trainer", "--rendezvous", abstract_address("woken")], []
    job = [*where, *JOB, "--steps", STEPS, "--nranks", 2, "--rank"]
    with monkeypatch.context() as before:
        before.setenv(RESTARTS_VARIABLE, "0")
        before.setenv(FAULT_HERE_VARIABLE, "joining:0:stop")
        woken = start(*job, 1)
    process = psutil.Process(woken.process.pid)
    until(lambda: process.status() == psutil.STATUS_STOPPED, "it to freeze")
    first = start(*job, 0, "--json", tmp_path / "record.json")
    process.send_signal(signal.SIGCONT)
    assert woken.code == StaleEpoch.exit_code
    assert "StaleEpoch: rank 1 is of epoch 0, this is epoch 1 of the group" in woken.err
    second = start(*job, 1)
    end_together([first, second, *servers])
    for each in (first, second):
        each.ended_well()
    assert digest_in(tmp_path / "record.json") == undisturbed(run, once)
