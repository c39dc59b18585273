"""What a user's program that ended badly is told: last of all that it uses neither scheme, if it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from common.program.script import hint_after_training, report, run_script
from common.system.process import PARENT_VARIABLE
from tests.support.groups import ROOT


@pytest.fixture
def without_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process whose program has imported neither."""
    for name in ("ps", "collective"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("without_schemes")
def test_the_hint_comes_after_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("mine.py", ValueError("no group")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-3:-1] == ["ValueError: no group", ""]
    assert lines[-1].startswith("mine.py uses neither ps nor collective: leave out --no-install, or change its import")


TOLD = "mine.py uses neither ps nor collective: its 4 ranks ran apart; leave out --no-install"


@pytest.mark.usefixtures("without_schemes")
@pytest.mark.parametrize(("rank", "nranks", "told"), [("0", "4", True), ("1", "4", False), ("0", "1", False)])
def test_ranks_of_a_program_that_knows_nothing_of_the_others_are_said_to_have_run_apart(
    rank: str, nranks: str, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "paddle", sys)
    monkeypatch.setenv("PADDLE_TRAINER_ID", rank)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", nranks)
    monkeypatch.delenv("PADDLE_TRAINER_ENDPOINTS", raising=False)
    hint_after_training("mine.py")
    assert (TOLD in capsys.readouterr().err) == told
    monkeypatch.setitem(sys.modules, "collective", sys)
    hint_after_training("mine.py")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["collective", "ps", "neither"])
def test_ranks_that_train_a_static_graph_are_said_to_have_trained_apart(
    scheme: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its plain `minimize` is Paddle's own, which synchronises nothing either."""
    dynamic = [False, True]
    monkeypatch.setitem(sys.modules, "paddle", SimpleNamespace(in_dynamic_mode=dynamic.pop))
    monkeypatch.setitem(sys.modules, scheme, sys)
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
    told = (
        "\nmine.py ended in a static graph, of which nothing is synchronised: what its 4 ranks trained there, they "
        "trained apart\n"
    )
    hint_after_training("mine.py")
    assert told not in capsys.readouterr().err
    hint_after_training("mine.py")
    assert capsys.readouterr().err == told


def test_a_program_that_imports_a_scheme_is_not_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ps", sys)
    assert report("mine.py", SystemExit(3)) == 3
    assert report("mine.py", SystemExit("what is wrong")) == 1
    assert capsys.readouterr().err == "what is wrong\n"


@pytest.mark.usefixtures("without_schemes")
@pytest.mark.parametrize(
    ("source", "error", "told"),
    [
        ("import nosuchpkg\nimport ps as fleet\n", ValueError(), False),
        ("def main():\n    from collective.group import connect\n", ValueError(), False),
        ("import nosuchpkg\n", ModuleNotFoundError("No module named 'nosuchpkg'"), False),
        ("def (\n", SyntaxError(), False),
        ("import psutil\nfrom .ps import x\n", ValueError(), True),
    ],
)
def test_a_program_that_ended_above_its_import_is_not_told_to_change_it(
    source: str, error: Exception, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "early.py"
    script.write_text(source)
    assert report(str(script), error) == 1
    assert ("uses neither ps nor collective" in capsys.readouterr().err) == told


@pytest.mark.usefixtures("without_schemes")
def test_our_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("mine.py", UsageError("no such script: mine.py")) == UsageError.exit_code
    assert capsys.readouterr().err == "mine.py: UsageError: no such script: mine.py\n"


def test_our_errors_name_the_programs_innermost_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "helper.py").write_text(
        "from common.errors import choose\n\ndef go():\n    choose('fruit', 'pea', ['fig'])\n"
    )
    script = tmp_path / "mine.py"
    script.write_text("import helper\n\nhelper.go()\n")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as raised:
        run_script([str(script)])
    report("mine.py", raised.value.with_traceback(raised.tb.tb_next))  # without this test's own frame
    assert capsys.readouterr().err == f"{tmp_path / 'helper.py'}:4: UsageError: unknown fruit 'pea' (known: fig)\n"


BESIDE = """
import os, pickle, sys
os.chdir(sys.argv[1])
class Mine: pass
assert sys.modules["__main__"].Mine is pickle.loads(pickle.dumps(Mine))
print(__name__, __file__, sys.argv[0], os.path.dirname(os.path.abspath(__file__)), __spec__, __package__, __doc__)
"""


def test_a_program_finds_what_lies_beside_it_wherever_it_goes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BESIDE)
    (tmp_path / "elsewhere").mkdir()
    start = str(ROOT / "common" / "program" / "start.py")
    said = [
        subprocess.run([sys.executable, *by, "mine.py", "elsewhere"], cwd=tmp_path, capture_output=True, check=True)
        for by in ([], [start])
    ]
    assert said[1].stdout == said[0].stdout


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("def inner():\n    raise ValueError('why')\ninner()\n", '  File "{script}", line 3, in <module>'),
        ("def (\n", '  File "{script}", line 1'),
    ],
)
def test_a_programs_traceback_begins_with_the_program(
    source: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(source)
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises((ValueError, SyntaxError)) as raised:
        run_script([str(script)])
    report(str(script), raised.value.with_traceback(raised.tb.tb_next))  # without this test's own frame
    lines = capsys.readouterr().err.splitlines()
    assert first.format(script=script) in lines[:2]


@pytest.mark.parametrize("under_a_launcher", [True, False])
def test_paddles_handler_of_sigterm_is_taken_away_as_soon_as_paddle_is_imported(
    tmp_path: Path, *, under_a_launcher: bool
) -> None:
    (tmp_path / "paddle.py").write_text("import faulthandler, signal\nfaulthandler.register(signal.SIGTERM)\n")
    script = tmp_path / "mine.py"
    script.write_text("import paddle, os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "common" / "program" / "start.py"), str(script)],
        cwd=ROOT,
        env={**os.environ, **({PARENT_VARIABLE: str(os.getpid())} if under_a_launcher else {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if under_a_launcher:
        assert (done.returncode, done.stderr) == (-15, "")
    else:
        assert "mine.py" in done.stderr  # the handler's own words


def test_a_programs_threads_take_turns_as_they_do_under_paddle(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import sys\nprint(sys.getswitchinterval())\n")
    start = str(ROOT / "common" / "program" / "start.py")
    done = subprocess.run(
        [sys.executable, start, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "0.005\n"
