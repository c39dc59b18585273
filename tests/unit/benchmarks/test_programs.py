"""Others' programs: what is taken from where, what is skipped, and what is said of their runs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.programs import recording
from benchmarks.programs.kept import Kept
from benchmarks.programs.manifest import MANIFEST, Program, blocks_of, lay_out, missing, read_manifest
from benchmarks.programs.records import OfRank, Recorded, compared, distance, read_records
from benchmarks.programs.variants import run_variant
from benchmarks.records.programs import Outcome
from benchmarks.verbs.programs import ProgramsConfig, programs
from common.errors import DataError, UsageError

OK = Outcome(how="ok")
TINY = "import helper\nprint(helper.WORD, 'gpu')\n"
PAGE = """
.. code-block:: python
    :linenos:

    a = 1

    def f():
        return a

text
    .. code:: py

        >>> import paddle
        >>> for i in range(2):
        ...     print(i)
        0
        1

.. code-block:: bash

    ls
"""


def recorded(*ranks: list[object], printed: str = "") -> Recorded:
    return {
        rank: OfRank([np.asarray(each, np.float32) for each in arrays], printed) for rank, arrays in enumerate(ranks)
    }


def described(tmp_path: Path, **more: object) -> Program:
    """Of a tiny program that lies in the folder."""
    home = tmp_path / "own+tiny" / "tools"
    home.mkdir(parents=True, exist_ok=True)
    (home / "run.py").write_text(TINY)
    (home / "helper.py").write_text("WORD = 'hello'\n")
    sha256 = hashlib.sha256(TINY.encode() + b"WORD = 'hello'\n").hexdigest()
    about = {"name": "tiny", "repository": "own/tiny", "commit": "0" * 40, "path": "tools/run.py", "sha256": sha256}
    return Program(**{**about, "files": ["tools/helper.py"], **more})  # type: ignore[arg-type]


def test_the_manifest_says_of_at_least_forty_programs_where_they_are_from() -> None:
    found = read_manifest(MANIFEST)
    assert len(found) >= 40
    assert len({program.name for program in found}) == len(found)
    assert {(len(program.commit), len(program.sha256)) for program in found} == {(40, 64)}


def test_what_lies_there_is_taken_only_if_it_is_the_same(tmp_path: Path) -> None:
    program = described(tmp_path)
    assert missing(program, tmp_path) == ""
    (tmp_path / "own+tiny/tools/helper.py").write_text("WORD = 'other'\n")
    assert missing(program, tmp_path).startswith("another version lies there: sha256 ")
    (tmp_path / "own+tiny/tools/helper.py").unlink()
    assert missing(program, tmp_path) == "no own+tiny/tools/helper.py"


def test_a_copy_is_changed_and_what_lies_there_is_not(tmp_path: Path) -> None:
    program = described(tmp_path, folder=".", replace=[("'gpu'", "'{data}/x'")], write={"conf/a.yaml": "a: {data}\n"})
    start, script = lay_out(program, tmp_path, tmp_path / "copy")
    assert start.samefile(tmp_path / "copy")
    assert script.read_text() == f"import helper\nprint(helper.WORD, '{tmp_path}/data/x')\n"
    assert (start / "conf/a.yaml").read_text() == f"a: {tmp_path}/data\n"
    assert (tmp_path / "own+tiny/tools/run.py").read_text() == TINY


def test_a_change_that_finds_nothing_to_change_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tiny: no 'cuda' in tools/run\.py"):
        lay_out(described(tmp_path, replace=[("cuda", "cpu")]), tmp_path, tmp_path / "copy")


def test_a_pages_blocks_of_python_lose_indentation_prompts_and_output() -> None:
    first, second = blocks_of(PAGE)
    assert first == "a = 1\n\ndef f():\n    return a\n"
    assert second == "import paddle\nfor i in range(2):\n    print(i)\n"


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=17), st.integers(0, 16), st.integers(0, 31))
def test_one_other_bit_is_a_difference(bits: list[int], place: int, bit: int) -> None:
    values = np.asarray(bits, np.int32)
    changed = values.copy()
    changed.view(np.uint32)[place % len(bits)] ^= np.uint32(1 << bit)
    one, other = ({0: OfRank([each.view(np.float32)], "")} for each in (values, changed))
    assert distance(one, one) == 0.0
    assert distance(one, other) != 0.0


def test_the_distance_is_relative_to_the_second() -> None:
    assert distance(recorded([[3.0, 0.0]], [[0.0]]), recorded([[3.0, 4.0]], [[0.0]])) == pytest.approx(4 / 5)
    assert distance(recorded([[1.0]]), recorded([[1.0], [2.0]])) == np.inf
    assert distance(recorded([[1.0], [1.0]]), recorded([[1.0]])) == np.inf


def test_bits_are_compared_only_where_paddle_agrees_with_itself() -> None:
    one, other = recorded([[1.0, 2.0]]), recorded([[1.0, 4.0]])
    assert compared(one, one, one).how == "same bits"
    assert str(compared(other, one, one)) == "differs by 8.9e-01"
    assert compared(other, one, other).how == "ok"


def test_what_trains_nothing_is_held_against_what_paddle_printed() -> None:
    one, other = recorded([], printed="5\n"), recorded([], printed="6\n")
    assert compared(one, one, one).how == "same output"
    assert compared(other, one, one).how == "other output"
    assert compared(other, one, other).how == "ok"
    assert compared(recorded([]), recorded([]), recorded([])).how == "ok"


def test_a_process_that_is_a_rank_leaves_what_it_trained_and_printed(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    program = (
        "import paddle; w = paddle.base.framework.EagerParamBase([3], 'float32', name='w');"
        "w.set_value(paddle.to_tensor([1.0, 2.0, 3.0])); o = paddle.optimizer.SGD(0.5, parameters=[w]);"
        "(w * w).sum().backward(); o.step(); v = paddle.nn.Linear(1, 2);"
        "o = paddle.optimizer.AdamW(0.5, parameters=[{'params': v.parameters()}, {'params': [w]}]); print('trained')"
    )
    variables = {"PYTHONPATH": recording.__path__[0], "PROGRAMS_RECORD": str(tmp_path), "PADDLE_TRAINER_ID": "1"}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **variables}, check=True, timeout=100)
    (rank,) = read_records(tmp_path).items()
    assert rank[0] == 1
    assert rank[1].printed == "trained\n"
    w, *others = rank[1].parameters  # each once
    assert [other.shape for other in others] == [(1, 2), (2,)]
    np.testing.assert_array_equal(w, np.zeros(3, np.float32))  # w - 0.5 * 2 w


def test_a_run_is_kept_in_a_folder_that_is_given_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the program runs in another one
    as_rank = "import os\nos.environ['PADDLE_TRAINER_ID'] = '0'\nprint"
    program = described(tmp_path, spawns=True, replace=[("print", as_rank)])
    outcome, found = run_variant(program, "paddle", tmp_path, 1, Path("kept/1"))
    assert (outcome.how, outcome.error) == ("ok", "")
    assert found[0].printed == "hello gpu\n"
    assert read_records(tmp_path / "kept/1") == found


def test_a_rank_that_leaves_no_record_is_a_failure(tmp_path: Path) -> None:
    outcome, found = run_variant(described(tmp_path, spawns=True), "paddle", tmp_path, 2)
    assert (outcome.how, outcome.error) == ("failed", "ended well, but left no record of rank 0, 1")
    assert found == {}


def test_processes_that_were_one_rank_are_put_together_in_their_order(tmp_path: Path) -> None:
    for began, value in ((9, 1.0), (10, 2.0)):
        np.savez(tmp_path / f"0-{began}-77.npz", np.float32([value]))
        (tmp_path / f"0-{began}-77.txt").write_text(f"{value}\n")
    found = read_records(tmp_path)[0]
    assert [p.tolist() for p in found.parameters] == [[1.0], [2.0]]
    assert found.printed == "1.0\n2.0\n"


def test_paddles_runs_are_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> tuple[Outcome, Recorded]:
        folder.mkdir(parents=True)
        np.savez(folder / "0-1-1.npz", np.float32([len(made)]))
        (folder / "0-1-1.txt").write_text("")
        made.append(folder)
        return OK, read_records(folder)

    program = described(tmp_path)
    first = Kept(tmp_path / "kept", reuse=True).run(program, 2, 1, make)
    again = Kept(tmp_path / "kept", reuse=True).run(program, 2, 1, make)
    assert len(made) == 1
    assert distance(first[1], again[1]) == 0.0
    Kept(tmp_path / "kept", reuse=True).run(program, 3, 1, make)
    Kept(tmp_path / "kept", reuse=False).run(program, 2, 1, make)
    assert len(made) == 3


def ran(
    tmp_path: Path, variants: dict[str, tuple[Outcome, Recorded]], waived: str = "", **config: object
) -> tuple[int, dict[str, object]]:
    """The verb's exit code and its JSON, over a manifest of `tiny` and of `gone`, which is not there."""
    program = described(tmp_path)
    gone = {"name": "gone", "repository": "own/gone", "path": "x.py", "sha256": "0" * 64}
    tiny = {k: getattr(program, k) for k in ("name", "repository", "path", "sha256", "files")}
    tiny["waived"] = waived
    entries = ["[commits]", '"own/tiny" = "1"', '"own/gone" = "2"']
    for each in (tiny, gone):
        entries += ["[[programs]]", *(f"{key} = {json.dumps(value)}" for key, value in each.items())]
    (tmp_path / "manifest.toml").write_text("\n".join(entries))

    def run(_: Program, variant: str, __: Path, ___: int, keep: Path | None) -> tuple[Outcome, Recorded]:
        if keep is not None:
            keep.mkdir(parents=True)
        number = keep.name[-1] if keep is not None and "paddle2" in variants else ""
        return variants[variant + number]

    settings = {"programs": tmp_path, "manifest": tmp_path / "manifest.toml", "out": tmp_path / "out", **config}
    code = programs(ProgramsConfig(**settings), run)  # type: ignore[arg-type]
    return code, json.loads((tmp_path / "out/programs.json").read_text())


def test_what_works_under_paddle_must_work_under_both(tmp_path: Path) -> None:
    one, other = recorded([[1.0]]), recorded([[2.0]])
    same = {"paddle": (OK, one), "collective": (OK, one), "ps": (OK, one)}
    code, found = ran(tmp_path, same)
    assert code == 0
    (tiny,) = found["programs"]  # type: ignore[misc]
    assert [tiny[variant]["how"] for variant in same] == ["ok", "same bits", "same bits"]
    assert found["skipped"] == {"gone": "no own+gone/x.py"}
    assert ran(tmp_path, {**same, "ps": (OK, other)})[0] == 1
    assert ran(tmp_path, {**same, "collective": (Outcome(how="failed", error="exit code 2: x"), {})})[0] == 1
    page = (tmp_path / "out/programs.md").read_text()
    assert "| tiny |  | ok | exit code 2: x | same bits | own/tiny 1 tools/run.py |" in page
    assert "0 of these work under collective. Of 0 whose parameters" in page
    assert "1 of these work under ps. Of 1 whose parameters can be compared, 1 end in Paddle's bits." in page
    assert ran(tmp_path, {"paddle": (Outcome(how="failed", error="no GPU"), {})})[0] == 0


def test_where_paddle_does_not_agree_with_itself_nobody_need_agree_with_it(tmp_path: Path) -> None:
    one, other = recorded([[1.0]]), recorded([[2.0]])
    runs = {"paddle1": (OK, one), "paddle2": (OK, one), "paddle3": (OK, other)}  # it may take a while to show
    code, found = ran(tmp_path, {**runs, "collective": (OK, other), "ps": (OK, one)})
    assert code == 0
    (tiny,) = found["programs"]  # type: ignore[misc]
    assert [tiny[variant]["how"] for variant in ("paddle", "collective", "ps")] == ["ok"] * 3


def test_what_fails_under_paddle_is_tried_once_more(tmp_path: Path) -> None:
    one, failed = recorded([[1.0]]), (Outcome(how="failed", error="exit code 1, without a word"), {})
    runs = {"paddle1": failed, "paddle2": (OK, one), "collective": (OK, one), "ps": (OK, one)}
    code, found = ran(tmp_path, runs)
    assert code == 0
    (tiny,) = found["programs"]  # type: ignore[misc]
    assert [tiny[variant]["how"] for variant in ("paddle", "collective", "ps")] == ["ok", "same bits", "same bits"]
    _, found = ran(tmp_path, {"paddle1": failed, "paddle2": failed})
    (tiny,) = found["programs"]  # type: ignore[misc]
    assert [tiny[variant]["how"] for variant in ("paddle", "collective", "ps")] == ["failed", "not run", "not run"]


def test_of_what_need_not_agree_paddle_runs_once(tmp_path: Path) -> None:
    one, other = recorded([[1.0]]), recorded([[2.0]])
    runs = {"paddle1": (OK, one), "paddle2": (Outcome(how="failed", error="ran again"), {})}
    code, found = ran(tmp_path, {**runs, "collective": (OK, other), "ps": (OK, one)}, waived="it draws lots")
    assert code == 0
    (tiny,) = found["programs"]  # type: ignore[misc]
    assert [tiny[variant]["how"] for variant in ("paddle", "collective", "ps")] == ["ok", "ok", "same bits"]


def test_a_name_that_is_unknown_and_a_folder_without_programs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tinny"):
        ran(tmp_path, {}, only="tinny")
    with pytest.raises(UsageError, match=r"holds none of the programs: no own\+gone/x\.py"):
        ran(tmp_path, {}, only="gone")
