"""Reports in other languages: no sentence without a translation, no translation without a sentence, none half done."""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.contestants.table_of_sweeps import BACKENDS, load_backend
from benchmarks.flags.accuracy import AccuracyConfig
from benchmarks.flags.compare import CompareConfig
from benchmarks.flags.crossover import CrossoverConfig
from benchmarks.flags.script import CompareScriptConfig
from benchmarks.flags.sweep import SweepConfig
from benchmarks.netlab.cluster import why_no_cluster
from benchmarks.page import language
from benchmarks.page.language import LANGUAGES, catalogue, known, say, speaking
from benchmarks.page.reasons import reason
from benchmarks.reports.writing import write_report
from benchmarks.suites.job_file import PRESETS, Part, tomllib
from benchmarks.verbs.report import ReportConfig, report_again
from benchmarks.verbs.suite import SuiteConfig, command_of
from common.errors import DataError, UsageError
from tests.support.compare_samples import Page
from tests.support.report_samples import every_job, every_sample
from tests.support.reporting import to_html, to_markdown
from tests.support.typed_results import typed
from tests.unit.benchmarks.test_suite_report import a_compare, a_suite

SOURCES = sorted(Path(language.__file__).parents[1].rglob("*.py"))
OTHERS = [name for name in LANGUAGES if name != "en"]
Call = tuple[
    str, list[str], set[str] | None
]  # where; what may be said; the names of its figures, if they are all known


def calls() -> Iterator[Call]:
    """Every `say` and `mark` in the sources."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("say", "mark"):
                names = {keyword.arg or "**" for keyword in node.keywords}
                where = f"{file.name}:{node.lineno}"
                yield (
                    where,
                    list(choices(node.args[0], where)),
                    None if "**" in names or node.func.id == "mark" else names,
                )


def choices(node: ast.expr, where: str) -> Iterator[str]:
    """A literal, or `one if this else another`."""
    if isinstance(node, ast.IfExp):
        yield from choices(node.body, where)
        yield from choices(node.orelse, where)
    else:
        assert isinstance(node, ast.Constant), f"{where}: what is said must be a literal, or no catalogue can hold it"
        assert isinstance(node.value, str)
        yield node.value


def titles() -> Iterator[str]:
    """Those of presets that are more than names."""
    for file in PRESETS.glob("*.toml"):
        job = tomllib.loads(file.read_text())
        yield from (title for each in (job, *job["part"]) if (title := each["title"]) != "MNIST CNN")


def figures(template: str) -> set[tuple[str, str]]:
    """Names and formats of the {placeholders}."""
    return {(name, form or "") for _, name, form, _ in string.Formatter().parse(template) if name is not None}


@pytest.mark.parametrize("name", OTHERS)
def test_every_sentence_is_translated_and_no_translation_is_left_over(name: str) -> None:
    said = {sentence for _, sentences, _ in calls() for sentence in sentences} | {*titles()}
    assert len(said) > 250
    assert said - catalogue(name).keys() == set()
    assert catalogue(name).keys() - said == set()


@pytest.mark.parametrize("name", OTHERS)
def test_a_translation_has_the_figures_of_its_sentence(name: str) -> None:
    wrong = [sentence for sentence, told in catalogue(name).items() if figures(sentence) != figures(told)]
    assert wrong == []


def test_a_sentence_is_given_just_the_figures_that_it_names() -> None:
    for where, sentences, given in calls():
        if given is not None:
            assert given == {name for sentence in sentences for name, _ in figures(sentence)}, where


# What stays as it is in Chinese: names of schemes, modes, flags, software and data, units, and commands.
NAMES = """
broadcast PSS
GradSync Fleet paddle DataParallel numpy Python UTC CPU MKL AMD EPYC MNIST Fashion CNN MLP ResNet mnist cnn
local ps ring shm tcp grpc gloo mpi ray sync ssp async geo all reduce push pull collective sha ms float
Rank rank batch bucket chunk SGD adam digits TCP algbw busbw GB MB KiB MiB Mbit mbit gbit bootstrap data dir
default memory limit TLS tls NCCL PyTorch GPU CUDA cupy torch pip tc ddp DistributedDataParallel ip limit root sudo run
timeout repetitions kill PeerLost RecoveryFailed docs benchmarks md Gloo Paddle
"""


def texts(html: str) -> Iterator[str]:
    """All that a reader sees, hovers over or hears of a page, but for commands."""
    page = Page(re.sub(r'<pre>.*?</pre>|<span class="code">.*?</span>', "", html, flags=re.DOTALL))
    style = html.partition("<style>")[2].partition("</style>")[0]
    yield from (text for text in page.texts if text != style)
    yield from re.findall(r'(?:aria-label|title|alt)="([^"]*)"', html)


def english(text: str) -> list[str]:
    """The words of Latin letters that are no names."""
    return [word for word in re.findall(r"[A-Za-z]{2,}", text) if word not in NAMES.split()]


def every_report() -> Iterator[tuple[str, Any]]:
    yield from every_sample()
    yield from ((f"job-{number}", job) for number, job in enumerate(every_job()))


class Recorder(dict[str, str]):
    """A catalogue that notes what is looked up in it."""

    def __init__(self, sentences: dict[str, str]) -> None:
        super().__init__(sentences)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def test_a_chinese_report_has_no_english_left_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the samples say every sentence, so that each template was filled in once."""
    recorder = Recorder(catalogue("zh"))
    monkeypatch.setattr(language, "catalogue", lambda name: recorder)
    found: dict[str, set[str]] = {}
    with speaking("zh"):
        for name, results in every_report():
            html = to_html(results)
            assert '<html lang="zh-CN">' in html, name
            plain = re.sub(r"```.*?```", "", to_markdown(results), flags=re.DOTALL)
            plain = re.sub(r"</?(details|summary)>|\b[0-9a-f]{12}\b", "", plain)
            for text in (*texts(html), *unescape(plain).splitlines()):
                for word in english(text):
                    found.setdefault(word, set()).add(text[:80])
    assert not found, "; ".join(f"{word}: {min(where)}" for word, where in found.items())
    assert recorder.keys() - recorder.asked - {*titles()} == set()


def test_the_same_probe_finds_english() -> None:
    results = dict(every_sample())["comparisons-0"]
    words = {word for text in texts(to_html(results)) for word in english(text)}
    assert {"Throughput", "fastest", "contestant", "seconds", "backward", "Stacked", "linear", "Verdict"} <= words


def test_a_language_ends_with_its_block_and_figures_may_change_places() -> None:
    sentence, values = "{count} at N={nranks}", {"count": 3, "nranks": 2}
    assert say(sentence, **values) == "3 at N=2"
    with speaking("zh"):
        assert say(sentence, **values) == "N=2 有 3 个"
        assert known("{a user's} title") == "{a user's} title"
        with speaking("en"):
            assert say(sentence, **values) == "3 at N=2"
        with pytest.raises(UsageError), speaking("en"):
            raise UsageError("x")
        assert say(sentence, **values) == "N=2 有 3 个"
    assert say(sentence, **values) == "3 at N=2"


def test_whatever_this_machine_lacks_is_told_in_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {name: load_backend(name) for name in BACKENDS}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    lacks = {backend.why_absent(name) for name, backend in backends.items()} | {why_no_cluster()}
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    lacks |= {why_no_cluster()}
    assert len(lacks - {""}) > 5
    with speaking("zh"):
        assert [text for text in lacks - {""} if reason(text) == text] == []
        assert reason("ValueError: no.") == "ValueError: no"
    assert {reason(text) for text in lacks} == lacks


@pytest.mark.parametrize(
    "make",
    [
        lambda: CompareConfig(lang="zn"),
        lambda: CompareScriptConfig(lang="zn"),
        lambda: SweepConfig(lang="zn"),
        lambda: CrossoverConfig(lang="zn"),
        lambda: AccuracyConfig(lang="zn"),
        lambda: SuiteConfig(preset="quick", lang="zn"),
        lambda: ReportConfig(results=Path("x.json"), lang="zn"),
    ],
)
def test_unknown_languages_are_refused_before_anything_is_measured(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=r"unknown language 'zn'; did you mean '(en|zh)'\? \(known: en, zh\)"):
        make()


def test_parts_of_a_job_are_told_the_language(tmp_path: Path) -> None:
    part = Part("a", "A", ("compare",), script=Path("train.py"), arguments=("--x",))
    out = str(tmp_path / "parts" / "a")
    english_one, chinese = (SuiteConfig(preset="quick", out=tmp_path, lang=name) for name in ("en", "zh"))
    assert command_of(part, english_one) == ["compare", "--out", out, "train.py", "--x"]
    assert command_of(part, chinese) == ["compare", "--out", out, "--lang", "zh", "train.py", "--x"]


def test_results_hold_no_language(tmp_path: Path) -> None:
    results = typed(a_compare())
    write_report(results, tmp_path, "report", "zh")
    assert results == typed(a_compare())
    assert (
        (tmp_path / "report.md")
        .read_text()
        .startswith("# GradSync：参数服务器与环形 all-reduce 的比较\n\n- 结果逐位相同：")
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]


class TestReportAgain:
    @pytest.mark.parametrize(
        ("results", "title"),
        [(a_compare(), "# GradSync: parameter server against ring all-reduce"), (a_suite(), "A &lt;job>")],
    )
    def test_either_language_from_one_file(self, results: Any, title: str, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text(json.dumps(results))
        for name, tag in (("zh", "zh-CN"), ("en", "en")):
            report_again(ReportConfig(results=tmp_path / "results.json", lang=name, out=tmp_path))
            assert f'<html lang="{tag}">' in (tmp_path / "report.html").read_text()
        assert title in (tmp_path / "report.md").read_text()

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ("{", "results.json is not JSON: "),
            ("{}", "results.json holds no results of python -m benchmarks"),
            (json.dumps({**a_compare(), "schema": 2}), "results.json has schema 2, this version reads 1"),
            (json.dumps({**a_compare(), "runs": [{}]}), "results.json breaks the schema of its kind: "),
        ],
    )
    def test_files_without_results(self, content: str, text: str, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(DataError, match=re.escape(text)):
            report_again(ReportConfig(results=tmp_path / "results.json", out=tmp_path / "out"))
        assert not (tmp_path / "out").exists()

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"cannot read .*/nothing.json: No such file or directory"):
            report_again(ReportConfig(results=tmp_path / "nothing.json"))

    def test_from_the_command_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "x.json").write_text(json.dumps(a_compare()))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["benchmarks", "report", "x.json", "--lang", "zh"])
        assert main() == 0
        assert capsys.readouterr().out == "report: out/report/report.html (compare)\n"
        assert '<html lang="zh-CN">' in (tmp_path / "out" / "report" / "report.html").read_text()
