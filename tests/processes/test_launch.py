"""Jobs of real, short processes: how they end, who is blamed, and that nothing is left."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.errors import UsageError
from common.launch import launch
from common.launch.cli import run_command
from common.launch.config import TrainingConfig
from common.launch.launch import (
    Job,
    ProcessFailed,
    abstract_address,
    endpoints_of,
    flags_of,
    paddle_environment,
    start_servers,
    wait_for_file,
)
from common.system.process import PARENT_VARIABLE

pytestmark = pytest.mark.processes

LIMIT_S = 20.0
PAUSE = "import signal; signal.pause()"
DEAF = "import signal, pathlib, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
TELL = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('ready\\n'); "
WAIT_FOR_END_OF = """
import os, sys, time
while True:  # a zombie still counts as alive: this ends once the job has seen the end
    try:
        os.kill(int(sys.argv[1]), 0)
    except ProcessLookupError:
        sys.exit(int(sys.argv[2]))
    time.sleep(0.001)
"""
CHILD = """
import os, signal
from common.system.process import prepare_process
prepare_process()
os.write(1, b"here")
signal.pause()
"""
LAUNCHER = """
import sys
from common.launch.launch import Job
with Job() as job:
    job.start("rank 0", ["-c", sys.argv[1]], log="workerlog.0", on_terminal=True)
    job.wait()
"""


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SETTLE_S", 0.3)
    monkeypatch.setattr(launch, "TERMINATE_S", 0.5)


def start(job: Job, rank: int, code: str, *args: object) -> subprocess.Popen[bytes]:
    return job.start(f"rank {rank}", ["-c", code, *map(str, args)], log=f"workerlog.{rank}")


def failure_of(job: Job) -> ProcessFailed:
    with pytest.raises(ProcessFailed) as caught:
        job.wait()
    return caught.value


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


def test_a_killed_process_is_128_and_the_signal() -> None:
    with Job() as job:
        process = start(job, 0, PAUSE)
        process.kill()
        failure = failure_of(job)
    assert failure.exit_code == 137
    assert str(failure) == "rank 0 was killed by SIGKILL without a word"


def test_who_only_reports_anothers_failure_is_not_blamed() -> None:
    with Job() as job:
        reporter = start(job, 0, "raise SystemExit(4)")
        start(job, 1, WAIT_FOR_END_OF, reporter.pid, 7)
        failure = failure_of(job)
    assert failure.exit_code == 7
    assert str(failure).startswith("rank 1 ended with exit code 7")


def test_nobody_waits_long_for_a_culprit_that_is_frozen() -> None:
    begin = time.monotonic()
    with Job() as job:
        frozen = start(job, 0, PAUSE)
        frozen.send_signal(signal.SIGSTOP)
        start(job, 1, "raise SystemExit(4)")
        failure = failure_of(job)
        assert time.monotonic() - begin < launch.CULPRIT_S
    assert str(failure).startswith("rank 1 ended with exit code 4")


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


def test_leaving_the_job_ends_all_even_after_an_exception() -> None:
    processes = []

    def fail(job: Job) -> None:
        processes.extend(start(job, rank, PAUSE) for rank in range(2))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Job() as job:
        fail(job)
    assert [process.returncode for process in processes] == [-signal.SIGTERM] * 2


def test_leaving_the_job_ends_a_stopped_process() -> None:
    with Job() as job:
        process = start(job, 0, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        begin = time.monotonic()
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - begin < LIMIT_S


def test_leaving_the_job_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    with Job() as job:
        process = start(job, 0, DEAF + TELL + "signal.pause()", tmp_path / "ready")
        wait_for_file(tmp_path / "ready", job, timeout=LIMIT_S)
        begin = time.monotonic()
    assert process.returncode == -signal.SIGKILL
    assert 0.5 <= time.monotonic() - begin < LIMIT_S


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_children_end_with_a_launcher_that_is_told_to(how: signal.Signals, code: int) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, CHILD], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout as pipe:
        try:
            assert next_of(pipe.fileno()) == b"here"
            launcher.send_signal(how)
            assert launcher.wait(LIMIT_S) == code
            assert next_of(pipe.fileno()) == b""  # nobody holds the pipe any more
        finally:
            launcher.kill()
            launcher.wait()


def next_of(pipe: int) -> bytes:
    assert select.select([pipe], [], [], LIMIT_S)[0], "neither a word nor the end of the pipe"
    return os.read(pipe, 100)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_processes_are_ended_comes_after_that(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as it is in a background job
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}

    def end() -> None:
        with Job() as job:
            monkeypatch.setattr(job, "_end_all", lambda: [signal.raise_signal(number), ended.append(True)])

    with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt):
        end()
    found = {each: signal.getsignal(each) for each in handlers}
    signal.signal(signal.SIGINT, ignored)
    assert ended
    assert found == handlers


def test_a_launcher_that_is_told_to_end_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: Flags) -> None:
        with Job():
            signal.raise_signal(signal.SIGTERM)

    assert run_command(Flags, run, prog="ps.run", args=[]) == 143
    assert capsys.readouterr().err == "ps.run: terminated (SIGTERM)\n"


def test_the_handler_of_sigterm_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Job():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


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


def test_without_a_log_folder_nothing_is_kept() -> None:
    with Job() as job:
        start(job, 0, "print(1)")
        job.wait()
        scratch = job.scratch
        assert [path.name for path in scratch.iterdir()] == ["workerlog.0"]
    assert not scratch.exists()


def test_one_process_may_write_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('seen'); print('too', file=sys.stderr)"
    with Job() as job:
        job.start("rank 0", ["-c", code], log="workerlog.0", on_terminal=True)
        start(job, 1, "print('unseen')")
        job.wait()
    assert capfd.readouterr() == ("seen\n", "too\n")


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


def test_a_process_that_fails_before_its_file_is_ready_is_named(tmp_path: Path) -> None:
    begin = time.monotonic()
    with Job() as job:
        job.start("server 0", ["-c", "raise SystemExit('no port')"], log="serverlog.0")
        with pytest.raises(ProcessFailed, match=r"server 0 ended with exit code 1\n.*\n  \| no port") as caught:
            wait_for_file(tmp_path / "never", job, timeout=LIMIT_S)
    assert caught.value.exit_code == 1
    assert time.monotonic() - begin < LIMIT_S / 2


@dataclass(frozen=True)
class Flags:
    name: str = "a"
    hidden_size: int = 3
    fast: bool = False
    slow: bool = True
    path: Path | None = None


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


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("127.0.0.1:0", [["127.0.0.1", "0"], ["127.0.0.1", "0"]]),
        ("10.0.0.1:8600", [["10.0.0.1", "8600"], ["10.0.0.1", "8601"]]),
        ("[::1]:80", [["::1", "80"], ["::1", "81"]]),
    ],
)
@pytest.mark.parametrize("insecure", [True, False])
def test_servers_listen_one_after_the_other(
    first: str, expected: list[list[str]], insecure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(launch, "wait_for_file", lambda path, job, timeout: path.name)
    with Job() as job:
        monkeypatch.setattr(job, "start", lambda name, command, log, environment: commands.append(command))
        assert start_servers(job, 2, nranks=4, timeout=3.0, first=first, insecure=insecure) == ["server-0", "server-1"]
    value = {flag: [command[command.index(flag) + 1] for command in commands] for flag in ("--host", "--port")}
    assert [list(pair) for pair in zip(value["--host"], value["--port"], strict=True)] == expected
    assert [command[command.index("--shard") + 1] for command in commands] == ["0/2", "1/2"]
    assert ["--insecure" in command for command in commands] == [insecure] * 2


def test_what_a_child_has_started_ends_with_the_job(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    told = tmp_path / "grandchild"
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(told)!r}, "w").write(f"{{child.pid}}\\n")
"""
    with Job() as job:
        job.start("rank 0", ["-c", code], log="workerlog.0")
        job.wait()
        grandchild = Path("/proc", told.read_text().strip())
        assert grandchild.exists()
    wait_until(
        lambda: not grandchild.exists() or "Z" in (grandchild / "stat").read_text().rpartition(")")[2].split()[0]
    )


def test_folders_of_killed_launchers_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "gradsync-999999999-abc").mkdir()
    (tmp_path / f"gradsync-{os.getppid()}-abc").mkdir()
    with Job() as job:
        assert {p.name for p in tmp_path.iterdir()} == {f"gradsync-{os.getppid()}-abc", job.scratch.name}
    assert [p.name for p in tmp_path.iterdir()] == [f"gradsync-{os.getppid()}-abc"]


def test_servers_may_outlive_the_ranks_of_this_host_if_others_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "IDLE_SERVER_S", 0.0)
    with Job(all_ranks_here=False) as job:
        rank = job.start("rank 0", ["-c", ""], log="workerlog.0")
        job.start("server 0", ["-c", WAIT_FOR_END_OF, str(rank.pid), "0"], log="serverlog.0")
        job.wait()


def test_servers_that_nobody_joined_end_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "IDLE_SERVER_S", 0.2)
    with Job() as job:
        job.start("server 0", ["-c", PAUSE], log="serverlog.0")
        job.start("rank 0", ["-c", ""], log="workerlog.0")
        with pytest.raises(UsageError, match=r"the program never joined \(does it import ps\?\)"):
            job.wait()


def test_a_log_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match=f"cannot write to --log-dir {tmp_path}/file/logs"),
        Job(tmp_path / "file" / "logs"),
    ):
        pass
