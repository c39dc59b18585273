"""Jobs with `--max-restarts` of which a process is killed or frozen: the others keep theirs, and the bits are those of
the undisturbed run, under both schemes, of the built-in training and of a program with a `TrainingState`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from common.system.fault_points import FAULT_VARIABLE
from tests.support.commands import JOB, Started, digest_in, watched
from tests.support.groups import ROOT

pytestmark = pytest.mark.processes
STEPS = 40  # more than there are calls between ranks before the first one
long = pytest.mark.long
longest = pytest.mark.longest
Train = Callable[..., tuple[str, Started, int]]


@pytest.fixture
def train(tmp_path: Path, start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch) -> Train:
    """A training with a fault: its digest, what it was, and how many processes its launcher had."""

    def train(fault: str, *flags: object, nranks: int = 2, command: str = "collective.run") -> tuple[str, Started, int]:
        monkeypatch.setenv(FAULT_VARIABLE, fault)
        record = tmp_path / "record.json"
        given = [*JOB, "--steps", STEPS, "--nranks", nranks, "--json", record, *flags]
        started = start(command, *given)
        processes = watched(started)
        assert started.code == 0, started.err
        return digest_in(record), started, processes

    return train


Program = Callable[..., tuple[list[str], Started, int]]


@pytest.fixture
def program(tmp_path: Path, start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch) -> Program:
    """As `train`, of tests/programs/resumed.py, two epochs of 12 / nranks batches: what each rank says of the end."""
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")

    def run(
        fault: str, *flags: object, nranks: int = 2, workers: int = 2, command: str = "collective.run"
    ) -> tuple[list[str], Started, int]:
        monkeypatch.setenv(FAULT_VARIABLE, fault)
        monkeypatch.setenv("RESUMED_SCHEME", command.partition(".")[0])
        logs = tmp_path / f"logs of {fault}"
        script = [ROOT / "tests" / "programs" / "resumed.py", tmp_path / f"commits of {fault}", workers, 2]
        job = start(command, "--nranks", nranks, "--max-restarts", 3, "--log-dir", logs, *flags, *script)
        processes = watched(job)
        assert job.code == 0, job.err
        said = "".join(log.read_text(errors="replace") for log in sorted(logs.glob("workerlog.*")))
        return re.findall(r"^RESULT (.*)$", said, re.MULTILINE), job, processes

    return run


_undisturbed: dict[tuple[int, ...], object] = {}  # by ranks, and of a program also workers


def undisturbed(train: Train, nranks: int) -> str:
    if (nranks,) not in _undisturbed:
        _undisturbed[nranks,] = train("", nranks=nranks)[0]
    return str(_undisturbed[nranks,])


def undisturbed_program(program: Program, nranks: int, workers: int) -> object:
    if (nranks, workers) not in _undisturbed:
        _undisturbed[nranks, workers] = program("", nranks=nranks, workers=workers)[0]
    return _undisturbed[nranks, workers]


@pytest.mark.parametrize(
    ("fault", "who", "flags", "nranks"),
    [
        ("backward:1:3", "rank 1 was killed by SIGKILL", (), 2),
        pytest.param("backward:0:0", "rank 0 was killed", (), 2, marks=long),
        pytest.param("joined:1:0", "rank 1 was killed", (), 2, marks=long),
        pytest.param("joined:0:0", "rank 0 was killed", ("--backend", "tcp"), 4, marks=long),
        pytest.param("before-reduce:2:5", "rank 2 was killed", (), 4, marks=long),
        pytest.param("backward:0:2:exit", "rank 0 ended with exit code 1", ("--no-overlap",), 2, marks=long),
        pytest.param("before-reduce:0:4:stop", "rank 1 says: PeerStalled: rank 0", ("--timeout", 2), 2, marks=long),
        pytest.param("sending:1:37", "rank 1 was killed", ("--backend", "tcp"), 2, marks=long),
        pytest.param("receiving:0:36", "rank 0 was killed", ("--backend", "tcp"), 4, marks=long),
        pytest.param("sent:3:38", "rank 3", ("--backend", "tcp", "--algorithm", "ring"), 4, marks=long),
        pytest.param("backward:0:4", "rank 0 was killed", ("--shard-optimizer",), 2, marks=long),
        pytest.param("backward:1:4", "rank 1", ("--shard-optimizer", "--backend", "tcp"), 2, marks=long),
    ],
)
def test_who_dies_is_replaced_while_the_others_keep_their_processes(
    fault: str, who: str, flags: tuple[object, ...], nranks: int, train: Train
) -> None:
    digest, started, processes = train(fault, "--max-restarts", 3, *flags, nranks=nranks)
    name = f"rank {fault.split(':')[1]}"
    assert who in started.err
    assert f"; {name} is started again (restart 1 of 3), the others go on" in started.err
    back = re.search(
        r"recovered: all go on after step (\d+), ([01]) steps? replayed, .* s after that \(epoch 1\)", started.err
    )
    assert back, started.err
    assert processes == 1 + nranks + 1  # the guard, the ranks, and the one in the place of another
    assert digest == undisturbed(train, nranks)


@pytest.mark.parametrize(
    ("command", "who", "nranks"),
    [
        ("collective.run", 1, 2),
        pytest.param("collective.run", 0, 4, marks=long),
        pytest.param("ps.run", 1, 2, marks=long),
        pytest.param("ps.run", 0, 4, marks=longest),
    ],
)
def test_who_is_killed_before_it_has_joined_is_started_again_while_the_others_wait(
    command: str, who: int, nranks: int, train: Train
) -> None:
    digest, started, processes = train(f"joining:{who}:0", "--max-restarts", 3, nranks=nranks, command=command)
    assert f"; rank {who} is started again (restart 1 of 3), the others wait" in started.err
    back = r"recovered: the group is complete, 0 steps replayed, .* s after that \(epoch 0\)"
    assert re.search(back, started.err), started.err
    assert processes == 1 + nranks + 1 + (command == "ps.run")
    assert digest == undisturbed(train, nranks)


def recovered(started: Started, name: str, epoch: int = 1) -> bool:
    """Whether only this process was replaced, and at most one step replayed."""
    part = f"; {name} is started again (restart {epoch} of 3), the others go on"
    back = rf"recovered: all go on after step \d+, [01] steps? replayed, .* s after that \(epoch {epoch}\)"
    return part in started.err and bool(re.search(back, started.err)) and "starting all again" not in started.err


@pytest.mark.parametrize(
    ("fault", "flags", "nranks"),
    [
        ("pushed:1:3", (), 2),
        pytest.param("stored:s0:3", (), 2, marks=long),
        pytest.param("joined:1:0", (), 4, marks=long),
        pytest.param("replied:s1:4", ("--servers", 2), 4, marks=long),
        pytest.param("before-push:0:3", ("--data-plane", "tcp", "--servers", 2), 4, marks=long),
        pytest.param("got-commit:s0:0", ("--data-plane", "tcp"), 2, marks=longest),
        pytest.param("received:0:3", ("--data-plane", "grpc"), 2, marks=longest),
        pytest.param("committed:3:5", ("--no-overlap",), 4, marks=longest),
        pytest.param("stored:s0:2:stop", ("--timeout", 2), 2, marks=longest),
        pytest.param("backward:1:4:stop", ("--timeout", 2), 2, marks=longest),
    ],
)
def test_trainers_and_servers_are_replaced_while_the_others_keep_their_processes(
    fault: str, flags: tuple[object, ...], nranks: int, tmp_path: Path, train: Train
) -> None:
    logs, who = tmp_path / "logs", fault.split(":")[1]
    digest, started, processes = train(
        fault, "--max-restarts", 3, "--log-dir", logs, *flags, nranks=nranks, command="ps.run"
    )
    name, log = (f"server {who[1:]}", f"serverlog.{who[1:]}") if who[0] == "s" else (f"rank {who}", f"workerlog.{who}")
    assert recovered(started, name), started.err
    servers = flags[flags.index("--servers") + 1] if "--servers" in flags else 1
    assert processes == 1 + nranks + servers + 1  # the guard, and the one in the place of another
    assert f"GRADSYNC_FAULT_HERE={fault.split(':')[0]}:" in (logs / log).read_text()
    assert (logs / "serverlog.0").read_text().count("listens on") == 2
    assert digest == undisturbed(train, nranks)


@long
@pytest.mark.parametrize("second", ["joining:1:0", "joined:1:0"])
def test_a_trainer_in_the_place_of_the_dead_that_dies_too(second: str, train: Train) -> None:
    digest, started, _ = train(f"pushed:1:3,{second}", "--max-restarts", 3, command="ps.run")
    assert "; rank 1 is started again (restart 1 of 3), the others go on" in started.err
    assert second == "joined:1:0" or recovered(started, "rank 1", epoch=2), started.err
    assert digest == undisturbed(train, 2)


@long
def test_who_takes_the_place_of_the_dead_and_freezes_is_replaced_too(train: Train) -> None:
    digest, started, processes = train("backward:1:3,joining:1:0:stop", "--max-restarts", 3, "--timeout", 2)
    frozen = (
        r"rank 1 was frozen for 2 s before it joined, .* s after its start; rank 1 is started again \(restart 2 of 3"
    )
    assert re.search(frozen, started.err), started.err
    assert re.search(r"recovered: all go on after step \d+, [01] steps? replayed, .* \(epoch 2\)", started.err)
    assert "complete after 2 restarts (2 of a part, " in started.err
    assert processes == 1 + 2 + 2
    assert digest == undisturbed(train, 2)


@long
@pytest.mark.parametrize(
    ("fault", "said", "recovered_by"),
    [
        pytest.param(
            "joining:0:0:stop",
            r"rank 0 was frozen or silent; rank 1 says: PeerUnreachable: nobody answered at .*, .* s after its start; "
            r"rank 0 is started again \(restart 1 of 2\), the others go on",
            "recovered: all go on after step 0, 0 steps replayed",
            id="before the group was ever complete",
        ),
        pytest.param(
            "backward:1:3,joining:0:0:stop",
            r"rank 0 is frozen \(stopped, or in a debugger\); rank 1 .*PeerUnreachable: nobody answered at .*"
            r" within 2 s; .*; starting all again \(restart 2 of 2\)",
            "recovered: the group is complete again",
            id="while another one's place is taken",
        ),
    ],
)
def test_who_freezes_where_all_meet_is_named(fault: str, said: str, recovered_by: str, train: Train) -> None:
    digest, started, _ = train(fault, "--max-restarts", 2, "--timeout", 2)
    assert re.search(said, started.err), started.err
    assert recovered_by in started.err
    assert digest == undisturbed(train, 2)


@pytest.mark.parametrize(
    ("fault", "nranks", "workers", "flags"),
    [
        ("before-reduce:1:7", 2, 2, ()),
        pytest.param("before-reduce:0:8", 2, 2, (), marks=long),
        pytest.param("before-reduce:2:3", 3, 0, (), marks=long),
        pytest.param("before-reduce:1:5", 2, 2, ("--no-overlap",), marks=longest),
        pytest.param("before-reduce:0:7", 2, 2, ("--backend", "tcp"), marks=longest),
    ],
)
def test_a_program_with_a_training_state_goes_on_too(
    fault: str, nranks: int, workers: int, flags: tuple[object, ...], program: Program
) -> None:
    results, job, processes = program(fault, *flags, nranks=nranks, workers=workers)
    name = f"rank {fault.split(':')[1]}"
    assert f"{name} was killed by SIGKILL, " in job.err
    assert f"; {name} is started again (restart 1 of 3), the others go on" in job.err
    assert re.search(r"recovered: all go on after step \d+, [01] steps? replayed, .* \(epoch 1\)", job.err), job.err
    assert processes == 1 + nranks + 1
    assert len(results) == nranks
    assert results == undisturbed_program(program, nranks, workers)


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        pytest.param("collective.run", "before-reduce:1:7", marks=long),
        pytest.param("ps.run", "committed:1:8", marks=longest),
    ],
)
def test_who_is_busy_for_longer_than_the_timeout_when_another_dies_keeps_its_process(
    command: str, fault: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESUMED_BUSY", "0 6 5")
    results, job, processes = program(fault, "--timeout", 2, workers=0, command=command)
    assert recovered(job, "rank 1"), job.err
    assert f"{command}: rank 0 is alive, but busy; the others wait for as long as --wait-limit says" in job.err
    assert processes == 1 + 2 + (command == "ps.run") + 1
    assert results == undisturbed_program(program, 2, 0)


@pytest.mark.parametrize(
    ("fault", "nranks", "workers", "flags"),
    [
        pytest.param("committed:1:7", 2, 2, (), marks=long),
        pytest.param("stored:s0:6", 2, 2, (), marks=longest),
        pytest.param("received:0:8", 2, 0, (), marks=longest),
        pytest.param("replied:s1:3", 3, 2, ("--servers", 2), marks=longest),
        pytest.param("pushed:2:4", 3, 0, ("--servers", 2, "--data-plane", "tcp", "--no-overlap"), marks=longest),
        pytest.param("before-reply:s0:7", 2, 0, ("--data-plane", "grpc"), marks=longest),
        pytest.param("committed:1:9:stop", 2, 0, ("--timeout", 4), marks=longest),
        pytest.param("stored:s0:5:stop", 2, 0, ("--timeout", 4), marks=longest),
        # where trainers update, and servers only average
        pytest.param("received:1:7", 2, 2, ("--update", "trainer"), marks=longest),
        pytest.param("stored:s0:8", 2, 0, ("--update", "trainer"), marks=longest),
        pytest.param("committed:1:7", 2, 0, "clips", marks=longest),
    ],
)
def test_a_program_under_servers_goes_on_too(
    fault: str,
    nranks: int,
    workers: int,
    flags: tuple[object, ...] | str,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of whoever updates; they are the bits of a ring."""
    if flags == "clips":
        monkeypatch.setenv("RESUMED_CLIPS", "yes")
        given, expected = (), program("", nranks=nranks, workers=workers)[0]
    else:
        given, expected = tuple(flags), undisturbed_program(program, nranks, workers)
    results, job, processes = program(fault, *given, nranks=nranks, workers=workers, command="ps.run")
    who = fault.split(":")[1]
    assert recovered(job, f"server {who[1:]}" if who[0] == "s" else f"rank {who}"), job.err
    assert processes == 1 + nranks + (2 if "--servers" in given else 1) + 1
    assert results == expected
    assert len(results) == nranks


@longest
@pytest.mark.parametrize(
    ("faults", "restarts"),
    [
        ("pushed:1:3,stored:s0:2,received:0:3", 3),  # each life counts its steps anew
        ("committed:1:3,committed:1:0", 2),
    ],
)
def test_a_program_under_servers_that_loses_one_after_the_other(faults: str, restarts: int, program: Program) -> None:
    results, job, processes = program(faults, nranks=2, workers=0, command="ps.run")
    assert job.err.count("the others go on") == restarts, job.err
    assert processes == 1 + 2 + 1 + restarts
    assert results == undisturbed_program(program, 2, 0)


@longest
@pytest.mark.parametrize("fault", ["committed:1:7", "stored:s0:7"])
def test_a_program_under_servers_with_another_model_is_started_again(
    fault: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESUMED_OTHER", "yes")
    undisturbed, *_ = program("", nranks=2, workers=0, command="ps.run")
    results, job, _ = program(fault, nranks=2, workers=0, command="ps.run")
    assert "starting all again" in job.err, job.err
    assert "the others go on" not in job.err
    assert results == undisturbed
    assert len(results) == 2


@longest
def test_a_program_under_servers_before_whose_first_step_one_dies_is_started_again(program: Program) -> None:
    results, job, _ = program("committed:1:0", nranks=2, workers=0, command="ps.run")
    assert "starting all again" in job.err, job.err
    assert "the others go on" not in job.err
    assert results == undisturbed_program(program, 2, 0)
