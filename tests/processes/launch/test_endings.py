"""Jobs of real, short processes: how they end, and who is blamed."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from pathlib import Path

import pytest

from common.launch import job as launch
from common.launch.child import ProcessFailed
from common.system.out_of_memory import hint_of_memory
from tests.support.commands import until
from tests.support.jobs import PAUSE, WAIT_FOR_END_OF, failure_of, start
from tests.support.short_job import Job

pytestmark = pytest.mark.processes


def test_all_end_well() -> None:
    with Job() as job:
        processes = [start(job, rank, "pass") for rank in range(3)]
        job.wait()
    assert [process.returncode for process in processes] == [0, 0, 0]


def test_a_job_of_no_process_ends_at_once() -> None:
    with Job() as job:
        job.wait()


def test_a_failure_names_process_code_and_the_end_of_its_output() -> None:
    with Job() as job:
        start(job, 0, PAUSE)
        start(job, 1, "import sys\nfor i in range(20): print('line', i)\nprint('why', file=sys.stderr)\nsys.exit(3)")
        failure = failure_of(job)
    lines = str(failure).splitlines()
    assert failure.exit_code == 3
    assert lines[:2] == ["rank 1 ended with exit code 3", "  | (last lines of its output)"]
    assert lines[2:] == [*(f"  | line {i}" for i in range(9, 20)), "  | why"]


def test_a_failure_without_output_says_so() -> None:
    with Job() as job:
        start(job, 0, "raise SystemExit(9)")
        assert str(failure_of(job)) == "rank 0 ended with exit code 9 without a word"


@pytest.mark.parametrize("told", [True, False], ids=["told", "looks"])
def test_an_end_is_seen_at_once_however_seldom_a_calm_job_is_looked_at(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel does not tell."""
    monkeypatch.setattr(launch, "CALM_POLL_S", 1e5)
    if not told:
        monkeypatch.setattr(os, "pidfd_open", no_such_call)
    with Job() as job:
        start(job, 0, PAUSE)
        start(job, 1, "raise SystemExit(9)")
        assert failure_of(job).exit_code == 9


def no_such_call(_: int) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_killed_process_is_128_and_the_signal() -> None:
    with Job() as job:
        process = start(job, 0, PAUSE)
        process.kill()
        failure = failure_of(job)
    assert failure.exit_code == 137
    assert str(failure) == "rank 0 was killed by SIGKILL without a word"


def test_a_process_killed_where_memory_ran_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "killed_for_memory", lambda: 6)
    with Job(_killed=5) as job:
        process = start(job, 0, "import sys; print('there', flush=True)\n" + PAUSE)
        while not (job.children[0].log or Path()).read_text():
            time.sleep(0.01)
        job.children[0].look()
        process.kill()
        failure = failure_of(job)
    had = r"it had 0\.0 GB of the \d+\.\d GB here"
    assert re.match(f"rank 0 was killed by SIGKILL because memory ran out; {had}; use a smaller batch", str(failure))


def test_a_process_killed_with_most_of_the_memory_may_have_run_out_of_it() -> None:
    assert hint_of_memory(0, 0) == hint_of_memory(0, 1 << 20) == ""
    assert hint_of_memory(0, 1 << 60).startswith(", perhaps because memory ran out; it had 1152921504.6 GB of ")


def test_who_only_reports_anothers_failure_is_not_blamed() -> None:
    with Job() as job:
        reporter = start(job, 0, "raise SystemExit(4)")
        start(job, 1, WAIT_FOR_END_OF, reporter.pid, 7)
        failure = failure_of(job)
    assert failure.exit_code == 7
    assert str(failure).startswith("rank 1 ended with exit code 7")


@pytest.mark.parametrize(
    "missed",
    [
        "RendezvousError: rank 0 at gradsync-53aafb did not let rank 1 in (the connection was closed)",
        "PeerUnreachable: rank 1 cannot exchange data with server 0: its data port 10.0.0.1:86 did not let it in",
        "RendezvousError: rank 0 did not connect to rank 1 within 5 s",
    ],
)
def test_who_has_missed_another_is_not_blamed_though_it_was_seen_to_end_first(missed: str) -> None:
    """A killed process closes its connections before it has ended."""
    with Job() as job:
        reporter = start(job, 1, f"print('mine.py:3: {missed}'); raise SystemExit(2)")
        start(job, 0, WAIT_FOR_END_OF, reporter.pid, 1)
        assert str(failure_of(job)).startswith("rank 0 ended with exit code 1")


@pytest.mark.parametrize("code", [2, 4])
def test_a_server_that_refused_what_a_rank_did_is_not_blamed_before_the_rank(code: int) -> None:
    with Job() as job:
        server = job.start("server 0", ["-c", f"raise SystemExit({code})"], log="serverlog.0")
        start(job, 0, WAIT_FOR_END_OF, server.pid, code)
        assert str(failure_of(job)).startswith(f"rank 0 ended with exit code {code}")


def test_a_server_that_failed_by_itself_is_blamed_before_ranks_that_report_it() -> None:
    with Job() as job:
        rank = start(job, 0, "raise SystemExit(4)")
        job.start("server 0", ["-c", WAIT_FOR_END_OF, str(rank.pid), "1"], log="serverlog.0")
        assert str(failure_of(job)).startswith("server 0 ended with exit code 1")


def test_nobody_waits_long_for_a_culprit_that_is_frozen() -> None:
    begin = time.monotonic()
    with Job() as job:
        frozen = start(job, 0, PAUSE)
        frozen.send_signal(signal.SIGSTOP)
        start(job, 1, "raise SystemExit(4)")
        failure = failure_of(job)
        assert time.monotonic() - begin < launch.CULPRIT_S
    who = "rank 0 is frozen (stopped, or in a debugger); rank 1 ended with exit code 4"
    assert str(failure).startswith(who)
    assert failure.cause.startswith(who)


WRITES_WHEN_WOKEN = """
import os, signal, sys
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: Path(sys.argv[1]).touch())
signal.signal(signal.SIGCONT, lambda *_: Path(sys.argv[1]).touch())
Path(sys.argv[1] + " is ready").touch()
while True:
    signal.pause()
"""


def test_who_is_frozen_when_another_fails_never_wakes(tmp_path: Path) -> None:
    """It might write into what lives."""
    with Job(settle=0.1) as job:
        frozen = start(job, 0, WRITES_WHEN_WOKEN, tmp_path / "woken")
        until((tmp_path / "woken is ready").exists, "the rank")
        frozen.send_signal(signal.SIGSTOP)
        start(job, 1, "raise SystemExit(3)")
        assert str(failure_of(job)).startswith("rank 1 ended with exit code 3")
        assert frozen.poll() == -signal.SIGKILL
    assert not (tmp_path / "woken").exists()


def test_a_peer_error_alone_is_blamed() -> None:
    with Job() as job:
        start(job, 0, "pass")
        start(job, 1, "raise SystemExit(4)")
        failure = failure_of(job)
    assert failure.exit_code == 4
    assert str(failure).startswith("rank 1 ended with exit code 4")


@pytest.mark.parametrize("code", [3, 4])
def test_the_first_to_fail_is_blamed(code: int) -> None:
    with Job() as job:
        first = start(job, 0, f"raise SystemExit({code})")
        start(job, 1, WAIT_FOR_END_OF, first.pid, code + 2 * (code == 3))
        failure = failure_of(job)
    assert str(failure).startswith(f"rank 0 ended with exit code {code}")


def test_check_raises_only_after_a_failure() -> None:
    with Job() as job:
        start(job, 0, PAUSE)
        job.check()
        process = start(job, 1, "raise SystemExit(3)")
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessFailed, match="rank 1 ended with exit code 3"):
            job.check()
