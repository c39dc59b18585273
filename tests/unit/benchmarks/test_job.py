"""A job's TOML file: what it becomes, and what is said of a mistake before anything runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.suites.job_file import CONFIGS, JobFile, Part, preset, presets, read_job
from benchmarks.training.stand_in import write_idx_files
from benchmarks.verbs.suite import SuiteConfig, why_absent
from common.errors import UsageError
from common.trainer.data import load_dataset

SWEEP = '[[part]]\nname = "a"\nverb = "sweep"\n'


def read(folder: Path, text: str, data_dir: Path | None = None) -> JobFile:
    (folder / "job.toml").write_text(text)
    return read_job(folder / "job.toml", data_dir, lambda name: folder / "made" / name)


def test_lists_are_joined_and_a_matrix_is_every_combination(tmp_path: Path) -> None:
    job = read(
        tmp_path,
        'title = "T"\n[[part]]\nname = "x"\ntitle = "X"\nverb = "compare"\nminutes = 2\n'
        "flags = { nranks = [1, 2], steps = 9, overlap = false }\n"
        'matrix = { model = ["mnist-cnn", "mlp:8,8"], batch_size = [4] }\n',
    )
    assert job.title == "T"
    assert [part.name for part in job.parts] == ["x-mnist-cnn-4", "x-mlp-8-8-4"]
    assert job.parts[1].title == "X model mlp:8,8 batch_size 4"
    words = ("compare", "--nranks", "1,2", "--steps", "9", "--no-overlap", "--model", "mlp:8,8", "--batch-size", "4")
    assert job.parts[1].words == words
    assert job.parts[1].minutes == 2
    assert job.parts[1].command(Path("out"))[-2:] == ["--out", "out"]


def test_data_sets_come_from_the_folder_or_are_synthetic(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    text = (
        '[[part]]\nname = "a"\nverb = "compare"\nflags = { dataset = "mnist" }\n'
        '[[part]]\nname = "b"\nverb = "compare"\nscript = "train.py"\narguments = ["--data-dir={mnist}"]\n'
    )
    made, given = read(tmp_path, text), read(tmp_path, text, tmp_path / "data")
    assert (made.synthetic, given.synthetic) == (True, False)
    assert made.parts[0].words == ("compare", "--dataset", "synthetic")
    assert given.parts[0].words == ("compare", "--dataset", "mnist", "--data-dir", str(tmp_path / "data" / "mnist"))
    assert made.parts[1].arguments == (f"--data-dir={tmp_path}/made/mnist",)
    assert given.parts[1].command(Path("o")) == [
        *("compare", "--out", "o", str(tmp_path / "train.py"), f"--data-dir={tmp_path}/data/mnist")
    ]
    with pytest.raises(UsageError, match=r"part a needs the folder .*/nowhere/mnist; --data-dir names the"):
        read(tmp_path, text, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "job.toml lists no [[part]]"),
        ("part = 3", "job.toml lists no [[part]]"),
        ("[[part]\n", "is not TOML"),
        ('titel = "x"', "unknown key in job.toml 'titel'; did you mean 'title'"),
        ('[[part]]\nverb = "sweep"', "job.toml, part 1 has no name"),
        ('[[part]]\nname = "a"', "job.toml, part a has no verb"),
        ('[[part]]\nname = "a b"\nverb = "sweep"', "a name is made of letters, digits, '-', '_' and '.' (got 'a b')"),
        ('[[part]]\nname = "a"\nverb = "swep"', "unknown verb in job.toml, part a 'swep'; did you mean 'sweep'"),
        (SWEEP + "flag = {}", "unknown key in job.toml, part a 'flag'; did you mean 'flags'"),
        (SWEEP + 'minutes = "3"', "job.toml, part a: minutes must be a number (got '3')"),
        (SWEEP + "minutes = true", "job.toml, part a: minutes must be a number (got True)"),
        (SWEEP + "matrix = { op = 3 }", "matrix.op must be a list of values (got 3)"),
        (SWEEP + "flags = { sizes = {} }", "the flag sizes must be a text, a number, a list of them, or true or false"),
        (SWEEP + "flags = { out = 'x' }", "the flag out is not a part's to give"),
        (SWEEP + "flags = { lang = 'zh' }", "the flag lang is not a part's to give"),
        (SWEEP + "flags = { nrank = 2 }", "job.toml, part a: unknown flag --nrank; did you mean --nranks"),
        (SWEEP + "flags = { sizes = '1 apple' }", "job.toml, part a: --sizes: '1 apple' is not a size"),
        (SWEEP + 'script = "x.py"', 'script is for verb = "compare" with a script'),
        ('[[part]]\nname = "a"\nverb = "compare"\narguments = []', 'arguments is for verb = "compare" with a script'),
        ('[[part]]\nname = "a"\nverb = "compare"\nscript = "x.py"', "no such script: "),
        (
            '[[part]]\nname = "a"\nverb = "compare"\nflags = { nranks = [1, 2] }\n'
            'matrix = { scaling = ["weak", "strong"], batch-size = [5] }',
            "part a: --scaling strong shares --batch-size 5 equally, which 2 ranks cannot; give a multiple of 2",
        ),
        (SWEEP + SWEEP, "two parts are called a; give them different names"),
    ],
)
def test_mistakes_are_named_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the job .*/none\.toml: No such file"):
        read_job(tmp_path / "none.toml", None, lambda name: tmp_path)


@pytest.mark.parametrize(
    ("given", "said"), [({}, "give --preset"), ({"preset": "a", "config": Path("b")}, "one of them")]
)
def test_either_a_preset_or_a_file(given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SuiteConfig(**given)  # type: ignore[arg-type]


def test_presets_hold_every_kind_and_fit_the_flags(tmp_path: Path) -> None:
    assert presets() == ["accuracy", "full", "quick"]
    for name, most in (("quick", 6), ("full", 60), ("accuracy", 120)):
        job = read_job(preset(name), None, lambda dataset: tmp_path / dataset)
        assert sum(part.minutes for part in job.parts) <= most
        verbs = {part.words[0] for part in job.parts}
        assert verbs == ({"accuracy"} if name == "accuracy" else {"compare", "sweep", "crossover", "accuracy"})
        assert job.synthetic
    with pytest.raises(UsageError, match="unknown preset 'fulll'; did you mean 'full'"):
        preset("fulll")


def test_synthetic_data_as_files(tmp_path: Path) -> None:
    read, made = load_dataset("mnist", write_idx_files(tmp_path / "mnist")), load_dataset("synthetic")
    for found, expected in ((read.train, made.train), (read.test, made.test)):
        np.testing.assert_array_equal(found.labels, expected.labels)
        np.testing.assert_allclose(found.images, expected.images, atol=0.5 / 255 + 1e-6)


def test_a_verb_that_is_not_there_makes_its_part_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "sweep", "benchmarks.no_such_config:X")
    assert why_absent(Part("a", "a", ("sweep",))) == "this version of GradSync has no verb sweep"
    assert why_absent(Part("a", "a", ("compare",))) == ""
    assert "is not installed" in why_absent(Part("a", "a", ("compare",), script=Path("none.py")))
