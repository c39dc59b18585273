"""Where the output of a job's processes goes, and what is known to them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import UsageError
from common.launch import servers
from common.launch.child import ProcessFailed
from common.launch.restarts import Life
from common.launch.servers import wait_for_file
from common.launch.shown_log import ShownLog
from common.system.process import PARENT_VARIABLE
from tests.support.disks import fill, small_disk
from tests.support.jobs import LIMIT_S, WAIT_FOR_END_OF, failure_of, start
from tests.support.short_job import Job

pytestmark = pytest.mark.processes


def test_a_log_folder_keeps_the_files(tmp_path: Path) -> None:
    logs = tmp_path / "deep" / "logs"
    with Job(logs) as job:
        for rank in range(2):
            start(job, rank, f"import sys; print('out', {rank}); print('err', {rank}, file=sys.stderr)")
        job.start("rank 2", ["-c", "raise SystemExit('bad')"], log="workerlog.2", on_terminal=True)
        failure = failure_of(job)
    assert sorted(path.name for path in logs.iterdir()) == ["workerlog.0", "workerlog.1", "workerlog.2"]
    assert [(logs / f"workerlog.{r}").read_text() for r in (0, 1, 2)] == ["out 0\nerr 0\n", "out 1\nerr 1\n", "bad\n"]
    assert f"(last lines of {logs / 'workerlog.2'})\n  | bad" in str(failure)


def test_logs_are_their_users_alone(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").touch(mode=0o666)
    before = os.umask(0)
    try:
        with Job(tmp_path) as job:
            for rank in range(2):
                start(job, rank, "print('a secret')")
            job.wait()
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o600"}


def test_without_a_log_folder_nothing_is_kept() -> None:
    with Job() as job:
        start(job, 0, "print(1)")
        job.wait()
        scratch = job.scratch
        assert sorted(path.name for path in scratch.iterdir()) == ["sessions", "workerlog.0"]
    assert not scratch.exists()


def test_one_process_may_write_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('seen'); print('too', file=sys.stderr)"
    with Job() as job:
        job.start("rank 0", ["-c", code], log="workerlog.0", on_terminal=True)
        start(job, 1, "print('unseen')")
        job.wait()
    assert capfd.readouterr() == ("seen\n", "too\n")


def test_what_one_says_to_all_is_seen_though_its_output_is_not(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = "from common.system.process import say; print('unseen'); say('gradsync: look here')"
    with Job() as job:
        start(job, 1, code)
        job.wait()
    assert capfd.readouterr() == ("", "gradsync: look here\n")
    with Job(tmp_path) as job:  # of which the first one is seen anyway
        for rank in range(2):
            job.start(f"rank {rank}", ["-c", code], log=f"workerlog.{rank}", on_terminal=rank == 0)
        job.wait()
    assert (tmp_path / "workerlog.1").read_text() == "unseen\ngradsync: look here\n"
    assert capfd.readouterr().err == "gradsync: look here\n"


GO_ON = """
import sys
from pathlib import Path
print("seen", flush=True)
print("too", file=sys.stderr, flush=True)
while not Path(sys.argv[1]).exists():
    pass
print("last", end="")
"""


def test_with_a_log_folder_it_is_shown_while_it_writes(tmp_path: Path) -> None:
    """As without one. The program goes on only when its first lines have been read from the launcher's output."""
    launch = f"""
from pathlib import Path
from common.launch.job import Job
with Job(Path({str(tmp_path)!r})) as job:
    job.start("rank 0", ["-c", {GO_ON!r}, {str(tmp_path / "go on")!r}], log="workerlog.0", on_terminal=True)
    job.start("rank 1", ["-c", "print('unseen')"], log="workerlog.1")
    job.wait()
"""
    with subprocess.Popen([sys.executable, "-c", launch], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == [b"seen\n", b"too\n"]
            (tmp_path / "go on").touch()
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert (out, err) == (f"lastlogs of 2 processes: {tmp_path}\n".encode(), b"")
    assert (tmp_path / "workerlog.0").read_text() == "seen\ntoo\nlast"
    assert (tmp_path / "workerlog.1").read_text() == "unseen\n"


def test_what_it_writes_before_it_is_known_to_have_started_is_shown_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with much to do."""
    with Job(tmp_path) as job:
        start = job._guard.start

        def start_slowly(*given: Any, **also: Any) -> Any:
            process = start(*given, **also)
            process.wait(LIMIT_S)
            return process

        monkeypatch.setattr(job._guard, "start", start_slowly)
        job.start("rank 0", ["-c", "print('first')"], log="workerlog.0", on_terminal=True)
    assert capfd.readouterr().out == "first\n"


def test_a_log_that_goes_on_is_shown_from_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_bytes(b"of the life before\n")
    log = ShownLog(tmp_path / "log")
    with (tmp_path / "log").open("ab") as file:
        file.write(b"half a \xe2\x82")
        file.flush()
        log.show()
        file.write(b"\xac\n")
    log.close()
    assert capfd.readouterr() == ("half a \N{EURO SIGN}\n", "")


def test_who_takes_the_place_of_another_is_shown_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Job(tmp_path, life=Life(1)) as job:
        for line in ("of the first", "of the second"):
            first = job.start("rank 0", ["-c", f"print({line!r})"], log="workerlog.0", on_terminal=True)
            first.wait(LIMIT_S)
    assert capfd.readouterr().out == "of the first\nof the second\n"
    assert (tmp_path / "workerlog.0").read_text() == "of the first\nof the second\n"


def test_a_reader_who_has_gone_ends_no_job(tmp_path: Path) -> None:
    code = "print('x\\n' * 100_000)"
    launch = f"""
from pathlib import Path
from common.launch.job import Job
with Job(Path({str(tmp_path)!r})) as job:
    job.start("rank 0", ["-c", {code!r}], log="workerlog.0", on_terminal=True)
    while job.children[0].code is None:
        job.check()
"""
    with subprocess.Popen([sys.executable, "-c", launch], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(LIMIT_S) in (0, 120)  # Python's own, for what its standard output could not take
    assert len((tmp_path / "workerlog.0").read_text()) == 200_001


def test_a_process_can_be_talked_to() -> None:
    with Job() as job:
        process = job.start("rank 0", ["-c", "print(input() + '!', flush=True); input()"], log="workerlog.0", talk=True)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"hello!\n"
    assert process.stdout.closed


def test_a_process_knows_its_launcher_and_its_environment() -> None:
    code = "import os; print(os.environ['GRADSYNC_PARENT'], os.environ['EXTRA'], os.environ['PATH'] != '')"
    assert PARENT_VARIABLE == "GRADSYNC_PARENT"
    with Job() as job:
        job.start("rank 0", ["-c", code], log="log", environment={"EXTRA": "5", PARENT_VARIABLE: "overridden"})
        job.wait()
        assert (job.scratch / "log").read_text() == f"{os.getpid()} 5 True\n"


def test_a_file_is_read_once_its_line_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "address"
    code = "import sys; f = open(sys.argv[1], 'w'); f.write('127.0'); f.flush(); input(); f.write('.0.1:80\\n')"
    with Job() as job:
        process = job.start("server 0", ["-c", code, str(path)], log="log", talk=True)
        with pytest.raises(ProcessFailed, match=r"address was not ready within 0\.2 s"):
            wait_for_file(path, job, timeout=0.2)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert wait_for_file(path, job, timeout=LIMIT_S) == "127.0.0.1:80"


def test_a_slow_start_of_servers_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    files = [tmp_path / str(number) for number in range(3)]
    progress = servers.Progress(files)
    files[1].touch()
    for clock[0] in (1.0, 4.9, 5.1, 9.0):
        progress.look()
    files[2].touch()
    for clock[0] in (10.2, 11.0):
        progress.look()
    assert capsys.readouterr().err.splitlines() == [
        "gradsync: starting servers: 1 of 3 ready after 5 s",
        "gradsync: starting servers: 2 of 3 ready after 10 s",
    ]


def test_a_process_that_fails_before_its_file_is_ready_is_named(tmp_path: Path) -> None:
    begin = time.monotonic()
    with Job() as job:
        job.start("server 0", ["-c", "raise SystemExit('no port')"], log="serverlog.0")
        with pytest.raises(ProcessFailed, match=r"server 0 ended with exit code 1\n.*\n  \| no port") as caught:
            wait_for_file(tmp_path / "never", job, timeout=LIMIT_S)
    assert caught.value.exit_code == 1
    assert time.monotonic() - begin < LIMIT_S / 2


SAY = """
import sys
from common.system.process import last_words
with last_words():
    print(sys.argv[1], file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def start_on_terminal(job: Job, rank: int, code: str, *args: object) -> subprocess.Popen[bytes]:
    return job.start(f"rank {rank}", ["-c", code, *map(str, args)], log=f"workerlog.{rank}", on_terminal=True)


def test_last_words_on_the_terminal_are_left_to_the_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    with Job() as job:
        start_on_terminal(job, 0, SAY, "no such file", 2)
        failure = failure_of(job)
    assert (failure.exit_code, failure.words) == (2, "no such file")
    assert capfd.readouterr() == ("", "")


def test_of_two_that_fail_alike_the_first_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    with Job() as job:
        first = start(job, 1, SAY, "no such file", 2)
        then_say = WAIT_FOR_END_OF.replace("sys.exit(int(sys.argv[2]))", "break") + SAY
        start_on_terminal(job, 0, then_say, first.pid, 2)
        failure = failure_of(job)
    assert (failure.exit_code, failure.words) == (2, "")
    assert str(failure).startswith("rank 1 ended with exit code 2")
    assert str(failure).count("no such file") == 1
    assert capfd.readouterr() == ("", "")


def test_who_fails_on_the_terminal_without_words_is_named() -> None:
    with Job() as job:
        start_on_terminal(job, 0, "raise SystemExit(3)")
        failure = failure_of(job)
    assert (str(failure), failure.words) == ("rank 0 ended with exit code 3", "")


def test_last_words_go_to_a_log_where_there_is_one(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        start_on_terminal(job, 0, SAY, "no such file", 2)
        failure = failure_of(job)
    assert (tmp_path / "workerlog.0").read_text() == "no such file\n"
    assert str(failure).endswith("  | no such file")


def test_the_last_words_of_what_a_rank_starts_are_not_the_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {SAY!r}, 'mine', '0']).returncode)"
    with Job() as job:
        start_on_terminal(job, 0, code)
        job.wait()
    assert capfd.readouterr() == ("", "mine\n")


def test_a_log_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match=f"cannot write to --log-dir {tmp_path}/file/logs"),
        Job(tmp_path / "file" / "logs"),
    ):
        pass


def test_words_lost_to_a_full_disk_are_told(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as logs, Job(logs) as job:
        fill(logs)
        start(job, 0, "import sys; sys.exit('words')")
        failure = failure_of(job)
    lost = (
        f"what it wrote last is lost: {logs}/workerlog.0 takes no more (No space left on device); free some space there"
    )
    assert str(failure) == f"rank 0 ended with exit code 1 without a word\n{lost}"
