"""Programs that know nothing of us, under our launchers: the bits of the changed import and of Paddle's own groups."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.support import warm
from tests.support.groups import ROOT
from tests.support.unmodified import LAUNCHERS, run

PROGRAM = ROOT / "tests" / "programs" / "unchanged.py"
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the program's ranks end with, as DataParallel, under `collective`."""
    return run("collective", tmp_path_factory.mktemp("collective"), PROGRAM, "data_parallel")[0]


def test_an_unmodified_program_gives_the_bits_of_one_with_a_changed_import(tmp_path: Path, digests: list[str]) -> None:
    assert len(digests) == 2
    assert run("ps", tmp_path, PROGRAM, "data_parallel")[0] == digests
    assert run("ps", tmp_path, "--no-install", PROGRAM, "data_parallel", "ps")[0] == digests


@pytest.mark.long
def test_so_does_one_for_fleet(tmp_path: Path) -> None:
    schemes = ("ps", "collective")
    unmodified = [run(scheme, tmp_path, PROGRAM, "fleet")[0] for scheme in schemes]
    changed = [run(scheme, tmp_path, "--no-install", PROGRAM, "fleet", scheme)[0] for scheme in schemes]
    assert unmodified[0] == unmodified[1] == changed[0] == changed[1] != []


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("fit resume", marks=pytest.mark.long),
        pytest.param("data_parallel", marks=pytest.mark.longest),
        pytest.param("fused", marks=pytest.mark.longest),
    ],
)  # fleet: tests/system/test_examples.py
def test_an_unmodified_program_gives_the_bits_of_paddles_own_groups(tmp_path: Path, kind: str) -> None:
    found: dict[str, list[str]] = {scheme: [] for scheme in LAUNCHERS}
    for scheme in LAUNCHERS:
        (tmp_path / scheme).mkdir()
        for part in kind.split():
            found[scheme] += run(scheme, tmp_path / scheme / part, PROGRAM, part, cwd=tmp_path / scheme)[0]
    assert len(found["ps"]) == (6 if "fit" in kind else 2)
    assert found["ps"] == found["collective"] == found["paddle"]


def test_a_program_that_spawns_its_ranks_is_run_by_the_launchers(tmp_path: Path, digests: list[str]) -> None:
    assert run("ps", tmp_path, PROGRAM, "spawn")[0] == digests
    words = "UsageError: spawn: the program asks for 2 processes, but was started as 3 ranks; start it with --nranks 2"
    assert words in run("collective", tmp_path, "--nranks", "3", PROGRAM, "spawn", code=2)[1]


def test_ranks_that_a_program_spawns_itself_have_the_scheme_before_its_imports(
    tmp_path: Path, digests: list[str]
) -> None:
    """One process of ours: its `spawn` starts the ranks, which import the program and its `from ... import ...`."""
    one = run("collective", tmp_path, "--nranks", "1", PROGRAM, "spawn")[1]
    assert sorted(re.findall(r"RESULT . [0-9a-f]{64}", one)) == digests  # both write to one log


def test_a_program_given_as_a_module(tmp_path: Path, digests: list[str]) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text(PROGRAM.read_text())
    (package / "train.py").write_text("import sys\nfrom mine.helper import run\nrun(sys.argv[1], None)\n")
    assert run("collective", tmp_path, "-m", "mine.train", "data_parallel", cwd=tmp_path)[0] == digests
    said = run("collective", tmp_path, "-m", "mine.nothing", cwd=tmp_path, code=2)[1]
    assert f"mine.nothing: UsageError: no such module: mine.nothing (in {tmp_path} or installed)" in said


def test_a_program_that_uses_no_group_is_said_to_run_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm.COLD_VARIABLE, "1")  # what is forked from a launcher has the launcher's modules
    apart = tmp_path / "apart.py"
    apart.write_text("import paddle\n")
    words = "uses nothing of paddle.distributed, fleet, paddle.DataParallel or paddle.Model: its 2 ranks ran apart"
    assert f"{apart} {words}" in run("collective", tmp_path, apart)[1]
    words = "uses neither ps nor collective: its 2 ranks ran apart; leave out --no-install, or change its import of"
    assert f"{apart} {words} paddle.distributed" in run("collective", tmp_path, "--no-install", apart)[1]


def test_what_a_scheme_has_not_is_refused_in_our_words(tmp_path: Path) -> None:
    program = tmp_path / "scatters.py"
    program.write_text("import paddle.distributed as dist\ndist.init_parallel_env()\ndist.gloo_barrier()\n")
    said = run("collective", tmp_path, program, code=2)[1]
    assert "scatters.py:3: UsageError: paddle.distributed.gloo_barrier is not supported by collective, which is" in said


ENDS_AT_ONCE = """
import os
import paddle
import paddle.distributed as dist
dist.init_parallel_env()
model = paddle.DataParallel(paddle.nn.Linear(2, 2))
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
for step in range(2):
    model(paddle.ones([1, 2])).sum().backward()
    optimizer.step()
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
print("RESULT", dist.get_rank(), flush=True)
os._exit(0)
"""


def test_a_program_that_ends_by_os_exit_when_its_work_is_done_has_ended_well(tmp_path: Path) -> None:
    program = tmp_path / "ends.py"
    program.write_text(ENDS_AT_ONCE)
    assert run("ps", tmp_path, program)[0] == ["RESULT 0", "RESULT 1"]


OWN = """
import os, sys
import common, tests.mine, benchmarks.mine
from common.util import answer
assert (answer, tests.mine.x, benchmarks.mine.x) == (42, 1, 1)
folder = os.path.dirname(os.path.abspath(__file__))
assert os.path.dirname(common.util.__file__) == os.path.join(folder, "common")
if len(sys.argv) > 2:
    import {other}
    assert {other}.x == "theirs"
sys.argv[2:] = []
exec(open({program!r}).read())
from common import util
assert util.answer == 42
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheme", "other", "way"),
    [("ps", "collective", ["own.py"]), ("collective", "ps", ["-m", "own"]), ("collective", "", ["own.py"])],
)
def test_a_program_with_packages_of_our_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: list[str], scheme: str, other: str, way: list[str]
) -> None:
    """Started where they are; its own `ps` or `collective` only from another folder."""
    for name in ("common", "tests", "benchmarks", *([other] if other else [])):
        (tmp_path / name).mkdir()
    (tmp_path / "common" / "util.py").write_text("answer = 42\n")  # a package without __init__.py
    for name in ("tests", "benchmarks"):
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "mine.py").write_text("x = 1\n")
    if other:
        (tmp_path / other / "__init__.py").write_text("x = 'theirs'\n")
    (tmp_path / "own.py").write_text(OWN.format(program=str(PROGRAM), other=other or "common"))
    extra = ["with_other"] if other else []
    monkeypatch.setenv(warm.COLD_VARIABLE, "1")  # a warm interpreter has imported our `tests`
    assert run(scheme, tmp_path, *way, "data_parallel", *extra, cwd=tmp_path)[0] == digests


def test_a_program_with_its_own_common_may_still_name_its_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: list[str]
) -> None:
    (tmp_path / "common.py").write_text("answer = 42\n")
    program = tmp_path / "own.py"
    program.write_text(PROGRAM.read_text() + "\nfrom common import answer\nassert answer == 42\n")
    monkeypatch.setenv(warm.COLD_VARIABLE, "1")  # what is forked from a launcher has the launcher's modules
    assert run("collective", tmp_path, program, "data_parallel", "collective")[0] == digests
