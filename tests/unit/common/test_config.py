"""What can be set, what is refused and in which words, and how a command line ends."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main as benchmarks_main
from collective import run, trainer
from collective.command_flags import CollectiveTrainerConfig
from common import __version__, errors
from common.errors import GradSyncError, UsageError
from common.launch.cli import check_writable, run_command, split_script, to_reader
from common.launch.flags import DATASETS, MODELS, TrainingConfig
from common.launch.settings import check_rank
from common.system.addresses import parse_address, parse_addresses
from common.tensors.optimizers import OPTIMIZERS, AdamW
from ps import run as ps_run
from ps import server, status
from ps import trainer as ps_trainer
from ps.command_flags import RunConfig, TrainerConfig

pytest.importorskip("tyro")

REFUSED = {
    "model": (["--model", "mnst-cnn"], "unknown model 'mnst-cnn'; did you mean 'mnist-cnn'? (known: mnist-cnn, mlp)"),
    "model with sizes": (["--model", "mlq:8,8"], "unknown model 'mlq'; did you mean 'mlp'? (known: mnist-cnn, mlp)"),
    "dataset": (
        ["--dataset", "fashion_mnist"],
        "unknown dataset 'fashion_mnist'; did you mean 'fashion-mnist'? "
        "(known: digits, mnist, fashion-mnist, mnist-json, synthetic)",
    ),
    "optimizer": (
        ["--optimizer", "adan"],
        "unknown optimizer 'adan'; did you mean 'adam'? (known: sgd, momentum, adagrad, rmsprop, adam, adamw)",
    ),
    "steps": (["--steps", "0"], "--steps must be at least 1 (got 0)"),
    "negative steps": (["--steps", "-5"], "--steps must be at least 1 (got -5)"),
    "epochs": (["--epochs", "0"], "--epochs must be at least 1 (got 0)"),
    "batch size": (["--batch-size", "0"], "--batch-size must be at least 1 (got 0)"),
    "both lengths": (["--steps", "3", "--epochs", "1"], "give --steps or --epochs, not both"),
    "lr": (["--lr", "0"], "--lr must be a positive number (got 0.0)"),
    "negative lr": (["--lr", "-0.1"], "--lr must be a positive number (got -0.1)"),
    "lr not a number": (["--lr", "nan"], "--lr must be a positive number (got nan)"),
    "infinite lr": (["--lr", "inf"], "--lr must be a positive number (got inf)"),
    "timeout": (["--timeout", "0"], "--timeout must be a positive number (got 0.0)"),
    "wait limit": (["--wait-limit", "-1"], "--wait-limit must be a positive number (got -1.0)"),
    "infinite timeout": (["--timeout", "inf"], "--timeout must be a positive number (got inf)"),
}
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GradSyncError)]


def command(args: list[str], main=lambda config: None) -> int:  # type: ignore[no-untyped-def]
    return run_command(TrainingConfig, main, prog="a.command", args=args)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_one_line_and_exit_code_2(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    args, message = REFUSED[name]
    assert command(args, lambda config: pytest.fail("ran")) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"a.command: UsageError: {message}\n"


UNREADABLE = {
    "unknown": (["--no-such-thing", "1"], "unknown flag --no-such-thing; see --help"),
    "unknown and short": (["-x"], "unknown flag -x; see --help"),
    "misspelt": (["--batch-sise", "3"], "unknown flag --batch-sise; did you mean --batch-size?"),
    "misspelt with an underscore": (["--log_dri", "x"], "unknown flag --log-dri; did you mean --log-dir?"),
    "a part of one": (["--epoch", "3"], "unknown flag --epoch; did you mean --epochs?"),
    "two of them": (["--epoch", "3", "--step", "3"], "unknown flag --epoch; did you mean --epochs?"),
    "before what is wrong": (["--steps", "0", "--foo"], "unknown flag --foo; see --help"),
    "positional": (["positional"], "unexpected argument 'positional'; see --help"),
    "not a whole number": (["--batch-size", "1.5"], "--batch-size must be a whole number (got '1.5')"),
    "not a whole number, where it may be unset": (["--steps", "many"], "--steps must be a whole number (got 'many')"),
    "not a number": (["--lr", "fast"], "--lr must be a number (got 'fast')"),
    "no value": (["--steps"], "--steps needs a value"),
    "a file": (["/proc/version"], "/proc/version is no program: its name must end in .py; or see --help"),
    "a folder": (["/proc"], "/proc is a folder; name a program, as /proc/train.py, or see --help"),
    "a value too many": (["--no-overlap", "5"], "unexpected argument '5'; see --help"),
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("columns", ["40", "120"])
def test_what_cannot_be_read_is_one_line_and_exit_code_2(
    name: str, columns: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    args, message = UNREADABLE[name]
    assert command(args, lambda config: pytest.fail("ran")) == 2
    assert capfd.readouterr() == ("", f"a.command: UsageError: {message}\n")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--trainers", "2", "--nranks", "3"], "--trainers 2 and --nranks 3"),
        (["--nranks=3", "--trainers=2"], "--nranks 3 and --trainers 2"),
        (["--gpus", "0,1", "--devices", "1"], "--gpus 0,1 and --devices 1"),
    ],
)
def test_two_names_of_one_flag_cannot_differ(args: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert ps_run.main(args) == 2
    why = "contradict each other: these are names of one flag; give one of them"
    assert capfd.readouterr() == ("", f"ps.run: UsageError: {told} {why}\n")
    assert run_command(RunConfig, lambda _: 7, prog="ps.run", args=["--trainers", "3", "--nranks", "3"]) == 7


def test_a_file_in_no_folder_is_refused_and_no_folder_made(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=rf"^cannot write to --save {tmp_path}/no/m: there is no folder {tmp_path}/no; "
    ):
        check_writable("save", tmp_path / "no" / "m")
    assert not list(tmp_path.iterdir())
    check_writable("out", tmp_path / "made" / "report.html", make_folder=True)
    check_writable("save", tmp_path / "made" / "m.any")
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.parametrize("args", [["--log_dir", "logs", "--batch_size", "3"], ["--log-dir=logs", "--batch-size=3"]])
def test_flags_may_be_spelt_in_each_usual_way(args: list[str]) -> None:
    got: list[TrainingConfig] = []
    assert command(args, got.append) == 0
    assert got == [TrainingConfig(log_dir=Path("logs"), batch_size=3)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_of_ours_is_one_line_and_its_exit_code(
    kind: type[GradSyncError], capfd: pytest.CaptureFixture[str]
) -> None:
    def main(config: TrainingConfig) -> None:
        raise kind("rank 2 was lost in step 7")

    assert command([], main) == kind.exit_code
    assert capfd.readouterr() == ("", f"a.command: {kind.__name__}: rank 2 was lost in step 7\n")


def test_a_bug_keeps_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def main(config: TrainingConfig) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        command([], main)
    assert caught.traceback[-1].name == "main"
    assert capfd.readouterr().err == ""


def test_an_interrupt_is_one_line_and_130(capfd: pytest.CaptureFixture[str]) -> None:
    def main(config: TrainingConfig) -> None:
        raise KeyboardInterrupt

    assert command([], main) == 130
    assert capfd.readouterr().err == "a.command: interrupted\n"


def test_a_full_disk_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert command([], lambda _: Path("/dev/full").write_text("results") and None) == 1
    assert capfd.readouterr().err == "a.command: no space is left where it writes: free some, or write elsewhere\n"
    with pytest.raises(FileNotFoundError):
        command([], lambda _: Path("/nowhere/at/all").write_text("results") and None)


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (7, 7)])
def test_mains_result_is_the_exit_code(returned: int | None, code: int) -> None:
    assert command([], lambda config: returned) == code


@pytest.mark.parametrize(
    ("config", "prog"), [(TrainerConfig, "ps.trainer"), (CollectiveTrainerConfig, "collective.trainer")]
)
def test_a_trainer_writes_to_its_terminal_and_has_no_folder_for_logs(
    config: type, prog: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(config, lambda _: 0, prog=prog, args=["--log-dir", "logs"]) == 2
    assert "--log-dir" in capfd.readouterr().err


@pytest.mark.parametrize(
    "main", [server.main, status.main, ps_trainer.main, ps_run.main, trainer.main, run.main, benchmarks_main]
)
def test_every_command_tells_its_version(
    main: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["command", "--version"])
    try:
        code = main()
    except SystemExit as exc:
        code = int(exc.code or 0)
    assert (code, *capfd.readouterr()) == (0, f"gradsync {__version__}\n", "")


def unread(code: str) -> tuple[int | None, str]:
    """The exit code and stderr of a Python program whose stdout nobody reads."""
    sending = closed_pipe()
    done = subprocess.run([sys.executable, "-c", code], stdout=sending, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(sending)
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", ["compare --help", "--help"])
def test_what_nobody_reads_ends_quietly(words: str) -> None:
    code = f"import sys; from benchmarks.__main__ import main; sys.argv[1:] = {words.split()}; sys.exit(main())"
    assert unread(code) == (1, "")


def test_a_broken_connection_is_not_taken_for_a_reader_that_left(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BrokenPipeError):
        to_reader(lambda: os.write(closed_pipe(), b"x"))
    assert capfd.readouterr() == ("", "")


def closed_pipe() -> int:
    receiving, sending = os.pipe()
    os.close(receiving)
    return sending


def test_flags_become_fields() -> None:
    got: list[TrainingConfig] = []
    args = "--model mlp:64,32 --dataset mnist --data-dir /data --batch-size 7 --steps 9 --optimizer adamw --lr 0.5"
    more = "--seed 3 --json r.json --save m.pdparams --log-dir logs --timeout 2.5 --wait-limit 7 --no-overlap"
    assert command([*args.split(), *more.split()], got.append) == 0
    assert got == [
        TrainingConfig(
            model="mlp:64,32",
            dataset="mnist",
            data_dir=Path("/data"),
            batch_size=7,
            steps=9,
            optimizer="adamw",
            lr=0.5,
            seed=3,
            json=Path("r.json"),
            save=Path("m.pdparams"),
            log_dir=Path("logs"),
            timeout=2.5,
            wait_limit=7.0,
            overlap=False,
        )
    ]


def test_no_flag_gives_the_defaults() -> None:
    got: list[TrainingConfig] = []
    command([], got.append)
    assert got == [TrainingConfig()]


def test_help_lists_every_field_with_its_words(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        command(["--help"])
    assert caught.value.code == 0
    text = capfd.readouterr().out
    flags = set(re.findall(r"--([a-z-]+)", text))
    assert {field.name.replace("_", "-") for field in dataclasses.fields(TrainingConfig)} <= flags
    words = " ".join(text.replace("│", " ").split())
    assert "--batch-size INT Samples per rank and step. (default: 32) --" in words
    assert "--epochs INT Length of the training in passes over the data. (default: 1) --" in words
    assert "--json PATH Rank 0 writes its run record to this file. (optional) --" in words
    assert "None" not in text
    assert "a.command" in text


@pytest.mark.parametrize("name", [*MODELS, "mlp:1024,1024"])
def test_known_models(name: str) -> None:
    assert TrainingConfig(model=name).model == name


@pytest.mark.parametrize("name", DATASETS)
def test_known_datasets(name: str) -> None:
    assert TrainingConfig(dataset=name).dataset == name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_is_made_with_the_learning_rate(name: str) -> None:
    assert TrainingConfig(optimizer=name, lr=0.25).make_optimizer() == OPTIMIZERS[name](learning_rate=0.25)


def test_other_settings_are_the_optimizers_own() -> None:
    assert TrainingConfig(optimizer="adamw").make_optimizer() == AdamW(learning_rate=0.001, weight_decay=0.01)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TrainingConfig(), 45),
        (TrainingConfig(epochs=1), 45),
        (TrainingConfig(epochs=3), 135),
        (TrainingConfig(steps=1), 1),
        (TrainingConfig(steps=100), 100),
    ],
)
def test_total_steps(config: TrainingConfig, expected: int) -> None:
    assert config.total_steps(45) == expected


def test_a_configuration_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainingConfig().steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        TrainingConfig("mlp")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("args", "ours", "theirs"),
    [
        ([], [], []),
        (["--nranks", "4"], ["--nranks", "4"], []),
        (["train.py"], [], ["train.py"]),
        (["--nranks", "4", "a/train.py", "--lr", "1", "b.py"], ["--nranks", "4"], ["a/train.py", "--lr", "1", "b.py"]),
    ],
)
def test_a_script_ends_our_flags(args: list[str], ours: list[str], theirs: list[str]) -> None:
    assert split_script(args) == (ours, theirs)


def test_a_script_leaves_no_use_for_the_trainers_flags() -> None:
    TrainingConfig(model="mlp", steps=3).check_script([], ["--model", "mlp", "--steps", "3"])
    given = ["--timeout", "5", "--log-dir=logs"]
    TrainingConfig(timeout=5, log_dir=Path("logs")).check_script(["train.py", "--lr", "1"], given)
    for given in (["--batch-size", "5"], ["--batch-size=32"], ["--batch_size", "32"]):  # 32 is the default
        with pytest.raises(UsageError, match=r"--batch-size is for the built-in trainer; give train\.py its own arg"):
            TrainingConfig().check_script(["train.py"], given)


@pytest.mark.parametrize("launcher", [ps_run, run], ids=["ps", "collective"])
def test_launchers_miss_a_script_before_they_start_anything(launcher: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.main(["--nranks", "2", "trian.py", "--lr", "1"]) == UsageError.exit_code
    assert capsys.readouterr().err.endswith(f".run: UsageError: no such script: trian.py (in {Path.cwd()})\n")


@pytest.mark.parametrize("launcher", [ps_run, run], ids=["ps", "collective"])
def test_launchers_refuse_the_trainers_flags_whatever_their_value(
    launcher: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launcher.main(["--batch-size", "32", "train.py"]) == UsageError.exit_code
    assert ".run: UsageError: --batch-size is for the built-in trainer; give train.py" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "nranks"), [(0, 1), (0, 4), (3, 4)])
def test_ranks_inside(rank: int, nranks: int) -> None:
    check_rank(rank, nranks)


@pytest.mark.parametrize(
    ("rank", "nranks", "message"),
    [
        (4, 4, "rank 4 is outside 0..3 (--nranks 4)"),
        (-1, 4, "rank -1 is outside 0..3 (--nranks 4)"),
        (1, 1, "rank 1 is outside 0..0 (--nranks 1)"),
        (0, 0, "--nranks must be at least 1 (got 0)"),
        (0, -2, "--nranks must be at least 1 (got -2)"),
    ],
)
def test_ranks_outside(rank: int, nranks: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_rank(rank, nranks)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["127.0.0.1:8500", "node1:1", "[::1]:65535", "unix-abstract:x", "unix:/run/x"])
def test_addresses(text: str) -> None:
    assert parse_address(text) == text


@pytest.mark.parametrize("text", ["", "8500", ":8500", "host", "host:", "host:0", "host:65536", "host:-1", "host:x"])
def test_not_addresses(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"not an address: {text!r}; expected HOST:PORT")):
        parse_address(text)


def test_lists_of_addresses() -> None:
    assert parse_addresses("a:1") == ("a:1",)
    assert parse_addresses("a:1, b:2,c:3") == ("a:1", "b:2", "c:3")
    with pytest.raises(UsageError, match="not an address: ''"):
        parse_addresses("a:1,,b:2")
