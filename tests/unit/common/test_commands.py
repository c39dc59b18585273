"""Commands that explain others: `python -m ps`, `python -m collective`, and `compare` asked for help."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from contextlib import suppress

import pytest

import collective.__main__
import ps.__main__
from benchmarks.__main__ import main as benchmarks_main
from common import __version__
from common.credentials.credentials import CredentialFlags
from common.launch import cli
from common.launch.commands import list_commands


@pytest.mark.parametrize("package", ["ps", "collective"])
@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_a_package_lists_its_commands(
    package: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [package, *words])
    monkeypatch.delitem(sys.modules, f"{package}.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(package, run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert f"usage: python -m {package}.run " in out
    assert "script.py" in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(("package", "module"), [("ps", ps.__main__), ("collective", collective.__main__)])
def test_the_list_is_of_the_modules_that_can_be_run(package: str, module: object) -> None:
    for name in module.COMMANDS:  # type: ignore[attr-defined]
        found = importlib.util.find_spec(f"{package}.{name}")
        assert found is not None
        assert found.loader is not None
        assert 'if __name__ == "__main__"' in (found.loader.get_source(f"{package}.{name}") or "")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("run", "run is a module of its own: write python -m ps.run"),
        ("ps.run", "ps.run is a module of its own: write python -m ps.run"),
        ("rnu", "unknown command 'rnu'; did you mean 'run'? (known: run, server, trainer, status)"),
    ],
)
def test_what_is_no_command_is_one_line_and_exit_code_2(
    word: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ps", word, "--trainers", "2"])
    assert list_commands("ps", ps.__main__.COMMANDS) == 2
    assert capsys.readouterr() == ("", f"ps: UsageError: {told}\n")


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ps", "--version"])
    assert list_commands("ps", ps.__main__.COMMANDS) == 0
    assert capsys.readouterr().out == f"gradsync {__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--lr", "1", "--help"]])
def test_a_programs_own_help_compares_nothing(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "compare", "train.py", *words])
    assert benchmarks_main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("benchmarks compare: UsageError: --help after train.py is the program's own")
    assert "python -m benchmarks compare --help train.py, the program's by python train.py --help\n" in err


def test_the_help_of_compare_names_the_help_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--help"], ["compare", "--help"]):
        monkeypatch.setattr("sys.argv", ["benchmarks", *words])
        with suppress(SystemExit):
            benchmarks_main()
        assert "compare --help script.py" in " ".join(capsys.readouterr().out.replace("│", " ").split())


PADDLES = """
--------------------------------------
Error Message Summary:
PreconditionNotMetError: The third-party library (libmklml_intel.so) that Paddle depends on is not configured correctly.
  Suggestions: (error code is libmklml_intel.so: failed to map segment from shared object)
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ImportError("libpaddle.so: failed to map segment"), "libpaddle.so: failed to map segment"),
        (RuntimeError(PADDLES), PADDLES.splitlines()[-1].strip()),
        (MemoryError("Unable to allocate 8 GiB"), "Unable to allocate 8 GiB"),
    ],
)
def test_where_a_limit_of_memory_is_reached_one_line_says_so(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(_: CredentialFlags) -> None:
        raise error

    monkeypatch.setattr(cli, "limit_of_memory", lambda: 4096)
    assert cli.in_words(CredentialFlags, main, "x", []) == 1
    assert capsys.readouterr().err == f"x: not enough memory: {told} (it may have 4,096 bytes, ulimit -v)\n"
    monkeypatch.setattr(cli, "limit_of_memory", lambda: None)
    with pytest.raises(type(error)):
        cli.in_words(CredentialFlags, main, "x", [])


def test_what_has_nothing_to_do_with_memory_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(_: CredentialFlags) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "limit_of_memory", lambda: 4096)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.in_words(CredentialFlags, main, "x", [])
