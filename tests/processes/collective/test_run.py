"""The collective commands as a user runs them: what they write, how they refuse, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from common.credentials.token import new_token
from common.launch.ranks import abstract_address
from common.system.process import PARENT_VARIABLE
from common.tensors.arena import sha256_of_parameters
from common.trainer.record import RunRecord
from tests.support import warm
from tests.support.groups import DEADLINE_S, ROOT, environment, free_port
from tests.support.traces import check_causes, check_trace, read_trace

paddle = pytest.importorskip("paddle")
pytestmark = pytest.mark.processes

STEPS = 3
LONG = ["--model", "mlp:8", "--log-dir", "logs", "--trace", "t.json"]
GONE_S = 10.0


@pytest.fixture
def start(tmp_path):
    """Starts `python -m MODULE ARGS...` in an empty folder; whatever still runs at the end is killed."""
    started = []

    def run(module, *args, popen=warm.Popen):
        process = popen(
            [sys.executable, "-m", module, *map(str, args)],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        children = children_of(process.pid)
        process.kill()
        process.communicate()
        for pid in children:
            kill(pid)


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def children_of(launcher):
    """Processes, also orphaned ones, that this launcher started: they carry its number in their environment."""
    mark, found = f"{PARENT_VARIABLE}={launcher}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return sorted(found)


def wait_until(condition, what, seconds=DEADLINE_S):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.02)
    return value


def ended(process):
    """(exit code, stdout, lines of stderr)"""
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stdout, stderr.splitlines()


def assert_main_refuses(capfd, module, args, words):
    """As a command with these arguments does, without a process."""
    code = import_module(module).main(args)
    out, err = capfd.readouterr()
    assert_one_line(code, out, err.splitlines(), module, *words)


def assert_refused(process, prog, *words):
    assert_one_line(*ended(process), prog, *words)


def assert_one_line(code, stdout, lines, prog, *words):
    """Exit code 2 and one line on stderr that holds these words."""
    assert (code, stdout, len(lines)) == (2, "", 1), lines
    assert lines[0].startswith(f"{prog}: ")
    for word in words:
        assert word in lines[0]


def test_a_run_records_saves_and_reports(start, tmp_path):
    (tmp_path / "r").mkdir()
    files = ["--json", "r/f.json", "--save", "g.pdparams", "--trace", "t.json"]
    process = start("collective.run", "--nranks", 2, "--steps", STEPS, *files)
    code, stdout, lines = ended(process)
    assert (code, lines) == (0, [])
    record = json.loads((tmp_path / "r" / "f.json").read_text())
    assert set(record) == set(RunRecord.__dataclass_fields__)
    expected = {
        "scheme": "ring",
        "backend": "shm",
        "nranks": 2,
        "servers": 0,
        "model": "mnist-cnn",
        "dataset": "digits",
        "batch_size": 32,
        "optimizer": "adam",
        "learning_rate": 0.001,
        "seed": 1,
        "steps": STEPS,
        "warmup_steps": STEPS - 1,
    }
    assert {key: record[key] for key in expected} == expected
    assert record["samples_per_s"] == pytest.approx(2 * 32 / (record["step_ms"]["p50"] / 1e3))
    assert set(record["phases_ms"]) == {"input", "forward", "backward", "wait", "sync"}
    assert len(record["curve"]) == STEPS
    assert [record["loss"]["first"], record["loss"]["last"]] == [record["curve"][0][1], record["curve"][-1][1]]
    assert 0 <= record["accuracy"] <= 1
    state = paddle.load(str(tmp_path / "g.pdparams"))
    digest = sha256_of_parameters((name, np.asarray(value)) for name, value in state.items())
    assert digest == record["parameters_sha256"]
    assert f"sha256 {digest}" in stdout
    assert children_of(process.pid) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.pdparams", "r", "t.json"]
    trace, steps = read_trace(tmp_path / "t.json"), range(STEPS)
    check_trace(trace, nranks=2, steps=steps, buckets=1, phases=frozenset({"input", "forward", "backward", "update"}))
    check_causes(trace, nranks=2, steps=steps, buckets=1)
    for line in ("trace: t.json (open it at ui.perfetto.dev)", "rank  last in  lag ms  max ms"):
        assert line in stdout.splitlines()


def long_run(start):
    """A run that does not end by itself, once it is in its steps; and its ranks' process ids, rank 0 first.

    With interpreters of their own: /proc shows the arguments and the environment of each.
    """
    process = start("collective.run", "--nranks", 2, "--steps", 10**6, *LONG, popen=subprocess.Popen)
    ranks = wait_until(lambda: ranks_of(process.pid), "two ranks")
    wait_until(lambda: all(is_training(pid) for pid in ranks), "a first step")
    return process, ranks


def ranks_of(launcher):
    """Process ids of both ranks, rank 0 first; nothing while not both run their command."""
    ranks = {rank: pid for pid in children_of(launcher) if (rank := rank_of(pid)) is not None}
    return [ranks[0], ranks[1]] if len(ranks) == 2 else []


def rank_of(pid):
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return int(words[words.index(b"--rank") + 1]) if b"--rank" in words else None


def is_training(pid):
    """Whether the rank maps the board of all, its own parameters and gradients, and its neighbour's gradients, which it
    first does in the first all-reduce."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:gradsync") >= 4


def assert_no_child_left(process):
    wait_until(lambda: not children_of(process.pid), "all ranks ended", GONE_S)


def test_a_killed_rank_ends_the_run_and_is_named(start, tmp_path):
    process, ranks = long_run(start)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["workerlog.0", "workerlog.1"]
    os.kill(ranks[1], signal.SIGKILL)
    code, _, lines = ended(process)
    assert code == 128 + signal.SIGKILL
    assert lines[0].startswith("collective.run: ProcessFailed: rank 1 was killed by SIGKILL")
    assert "PeerLost: rank 1 died" in (tmp_path / "logs" / "workerlog.0").read_text()
    assert read_trace(tmp_path / "t.json")["otherData"]["missing"] == ["rank 1"]
    assert_no_child_left(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_killed_launcher_leaves_no_rank_behind(start, number, tmp_path):
    process, _ = long_run(start)
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130}[number]
    assert_no_child_left(process)
    if number != signal.SIGKILL:
        assert read_trace(tmp_path / "t.json")["otherData"]["missing"] == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "mnist-cn"], ["UsageError: unknown model 'mnist-cn'; did you mean 'mnist-cnn'?", "mlp"]),
        (["--backend", "shmm"], ["UsageError: unknown backend 'shmm'; did you mean 'shm'?", "auto, shm, tcp"]),
        (["--nranks", "0"], ["--nranks must be at least 1 (got 0)"]),
        (["--optimizer", "adm"], ["unknown optimizer 'adm'; did you mean 'adam'?"]),
        (["--steps", "0"], ["--steps must be at least 1 (got 0)"]),
        (["--timeout", "-1"], ["--timeout must be a positive number (got -1.0)"]),
        (["--steps", "1", "--epochs", "1"], ["give --steps or --epochs, not both"]),
    ],
    ids=lambda value: value[0].strip("-") if value[0].startswith("--") else "",
)
def test_run_refuses_what_cannot_work(capfd, args, words):
    assert_main_refuses(capfd, "collective.run", args, words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rank", "2"], ["UsageError: rank 2 is outside 0..1 (--nranks 2)"]),
        (["--rank", "-1"], ["UsageError: rank -1 is outside 0..1 (--nranks 2)"]),
        (["--rendezvous", "0.0.0.0:8600"], ["UsageError: refusing to listen on 0.0.0.0", "--insecure"]),
        (["--rendezvous", "192.0.2.1:8600"], ["UsageError: refusing to listen on 192.0.2.1", "--insecure"]),
    ],
    ids=["rank too high", "rank negative", "any host", "another host"],
)
def test_trainer_refuses_what_cannot_work(capfd, args, words):
    assert_main_refuses(capfd, "collective.trainer", args, words)


def test_a_limit_of_memory_that_paddle_does_not_fit_in_is_named():
    command = f"ulimit -v 400000; exec {sys.executable} -m collective.trainer --rank 0 --nranks 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("collective.trainer: not enough memory: ")
    assert last.endswith("(it may have 409,600,000 bytes, ulimit -v)")
    assert "Traceback" not in done.stderr


def test_trainers_that_disagree_on_nranks_are_both_told(start):
    rendezvous = abstract_address("test")
    both = [
        start("collective.trainer", "--rank", rank, "--nranks", nranks, "--rendezvous", rendezvous)
        for rank, nranks in ((0, 2), (1, 3))
    ]
    for process in both:
        assert_refused(process, "collective.trainer", "RendezvousError", "rank 1", "nranks 3", "the group with 2")


def test_a_rendezvous_port_that_is_taken_is_named(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert_refused(start("collective.trainer", "--rendezvous", address), "collective.trainer", "PortInUse", address)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--steps", "some"], ["UsageError: --steps must be a whole number (got 'some')"]),
        (["--nrank", "2"], ["UsageError: unknown flag --nrank; did you mean --nranks?"]),
        (["--devices", "0,1", "--nranks", "3"], ["--nranks 3 (3 on each host)", "--devices 0,1 (2 on each host)"]),
        (["--ips", "203.0.113.1,203.0.113.2"], ["UsageError: none of --ips 203.0.113.1,203.0.113.2 are addresses"]),
        (["--ips", "203.0.113.1,203.0.113.2", "--node-rank", "0"], ["UsageError: refusing to listen on 203.0.113.1"]),
    ],
    ids=["value", "flag", "devices", "ips", "no credentials"],
)
def test_flags_that_cannot_work_are_refused_in_one_line(capfd, args, words):
    assert_main_refuses(capfd, "collective.run", args, words)


def test_a_meeting_place_that_is_not_ours_is_named(capfd, monkeypatch):
    monkeypatch.setenv("GRADSYNC_TOKEN", new_token())
    args = ["--master", "192.0.2.1:8600", "--nnodes", "2", "--node-rank", "0"]
    assert_main_refuses(capfd, "collective.run", args, ["PortInUse: cannot listen on 192.0.2.1:8601"])


TELL_PLACE = """
import json, os, sys
import collective as fleet
fleet.init()
names = ["TRAINER_ID", "TRAINERS_NUM", "TRAINER_ENDPOINTS", "CURRENT_ENDPOINT", "LOCAL_RANK", "NNODES"]
told = [os.environ["PADDLE_" + name] for name in names] + [os.environ.get("FLAGS_selected_gpus")]
fleet.barrier()
open(f"place.{fleet.get_rank()}", "w").write(json.dumps(told))
"""


@pytest.mark.long
def test_two_launchers_make_one_job(start, tmp_path):
    (tmp_path / "place.py").write_text(TELL_PLACE)
    hosts = ["--master", f"127.0.0.1:{free_port()}", "--nnodes", 2]
    devices = {0: ["--gpus", "0,1"], 1: ["--devices", "3,2"]}
    launchers = [start("collective.run", *hosts, "--node_rank", i, *devices[i], "place.py") for i in (1, 0)]
    for launcher in launchers:
        assert ended(launcher) == (0, "", [])
    endpoints = ["127.0.0.1:6170", "127.0.0.1:6171"] * 2
    told = [json.loads((tmp_path / f"place.{rank}").read_text()) for rank in range(4)]
    common = ["4", ",".join(endpoints)]
    assert told == [
        ["0", *common, endpoints[0], "0", "2", "0"],
        ["1", *common, endpoints[1], "1", "2", "1"],
        ["2", *common, endpoints[2], "0", "2", "3"],
        ["3", *common, endpoints[3], "1", "2", "2"],
    ]


def test_what_all_ranks_fail_with_is_told_once(start, tmp_path):
    (tmp_path / "bug.py").write_text("import collective as fleet\nfleet.init()\nraise ValueError('too far')\n")
    code, stdout, lines = ended(start("collective.run", "--nranks", 3, "bug.py"))
    assert (code, stdout) == (1, "")
    assert [line.removeprefix("  | ") for line in lines].count("ValueError: too far") == 1, lines
    assert not any("PeerLost" in line for line in lines)


def test_what_one_rank_fails_with_is_told_once(start, tmp_path):
    body = (
        "import collective as fleet\nfleet.init()\nif fleet.get_rank(): raise ValueError('too far')\nfleet.barrier()\n"
    )
    (tmp_path / "bug.py").write_text(body)
    code, stdout, lines = ended(start("collective.run", "--nranks", 2, "bug.py"))
    assert (code, stdout) == (1, "")
    assert lines[0] == "collective.run: ProcessFailed: rank 1 ended with exit code 1"
    assert lines[-1] == "  | ValueError: too far"
    assert sum("too far" in line for line in lines) == 2, lines  # the statement, in the traceback, and the error
