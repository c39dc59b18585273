"""With a reduction that is broken on purpose nobody has a speed: exit code 3, on no terminal, in no report."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.contestants.table_of_trainings import Contestant
from benchmarks.flags.script import CompareScriptConfig
from benchmarks.records.script import ProgramRecord
from benchmarks.training import program_certificate
from benchmarks.verbs import script as compare_script
from common.errors import CertificateFailed
from tests.support.groups import ROOT
from tests.support.typed_results import program_record

PROGRAM = ROOT / "tests" / "programs" / "many_ways.py"
BROKEN = """
import sys
WORKERS = ("benchmarks.training.worker", "benchmarks.operations.worker")
if any(word in WORKERS or word.endswith("script_worker.py") for word in sys.orig_argv):
    from collective.group import Group
    whole = Group.all_reduce
    def broken(self, array, *args, **kwargs):
        whole(self, array, *args, **kwargs)
        array += self.rank
    Group.all_reduce = broken
"""
JOB = """
[[part]]
name = "compare"
verb = "compare"
flags = { model = "mlp:16", schemes = ["ps", "ring"], nranks = 2, servers = 1, backends = "shm", data-planes = "shm" }
[[part]]
name = "script"
verb = "compare"
script = "PROGRAM"
flags = { schemes = "ring", repetitions = 1 }
[[part]]
name = "sweep"
verb = "sweep"
flags = { nranks = [1, 2], backends = ["shm", "mpi"], sizes = "4KiB", repetitions = 1, seconds = 0.001 }
"""
SAID = {  # by each part, as one line
    "compare": "CertificateFailed: the schemes did not compute the same; see ",
    "script": "CertificateFailed: ring/shm N=2: ranks ended with different parameters; no speed is reported",
    "sweep": "CertificateFailed: wrong sums from shm N=2; no speed is reported",
}
SPEED = re.compile(r"\d[\d,.]* ?(samples/s|ms\b)|time ms|step ms|<svg|plotly")


def shown(file: Path) -> str:
    """What a reader sees of a report or log."""
    return re.sub(r"<(style|head)\b.*?</\1>", "", file.read_text(), flags=re.DOTALL)


@pytest.mark.processes
@pytest.mark.long
def test_every_part_of_a_preset_finds_a_broken_reduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paddle")
    from benchmarks.suites import job_file as job
    from benchmarks.verbs.suite import SuiteConfig, run_suite

    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    (tmp_path / "broken.toml").write_text(JOB.replace("PROGRAM", str(PROGRAM)))
    monkeypatch.setattr(job, "PRESETS", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"
    with pytest.raises(CertificateFailed) as caught:
        run_suite(SuiteConfig(preset="broken", out=out))
    assert caught.value.exit_code == 3
    parts = {each["name"]: each for each in json.loads((out / "suite.json").read_text())["parts"]}
    assert str(caught.value) == f"{', '.join(parts)} computed the wrong thing; see {out}/suite.md"
    for name, part in parts.items():
        assert part["status"] == "wrong", (name, part["reason"])  # that is exit code 3
        folder = out / "parts" / name
        assert (folder / "log.txt").read_text().splitlines()[-1].startswith(f"benchmarks {part['command'].split()[3]}")
        assert part["reason"].startswith(SAID[name])
        for file in (file for file in folder.iterdir() if file.suffix in (".txt", ".md", ".html")):
            assert not SPEED.search(shown(file)), file
    for results in (out / "parts" / "compare" / "results.json", out / "parts" / "script" / "script.json"):
        assert json.loads(results.read_text())["runs"] == []
    assert not SPEED.search(shown(out / "suite.md") + shown(out / "suite.html"))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("bits of ring", "the schemes did not compute the same; no speed is reported"),
        ("ranks of ring", "ring/shm N=2: ranks ended with different parameters; no speed is reported"),
        ("ranks of paddle", ""),  # Paddle's own may fail
    ],
)
def test_a_program_that_is_wrong_under_one_scheme_of_ours_has_no_speed_under_any(
    wrong: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_once(contestant: Contestant, *_: object, **__: object) -> ProgramRecord:
        if wrong == f"ranks of {contestant.scheme}":
            raise CertificateFailed("ranks ended with different parameters")
        digest = "b" if wrong == f"bits of {contestant.scheme}" else "a"
        return program_record(times=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], parameters_sha256=digest, memory_bytes=10**6)

    monkeypatch.setattr(compare_script, "run_once", run_once)
    monkeypatch.setattr(program_certificate, "parameters", lambda *_: {})
    with pytest.raises(CertificateFailed) if text else nullcontext() as caught:
        compare_script.compare_script(CompareScriptConfig(out=tmp_path, repetitions=1), [str(PROGRAM)])
    assert not text or (caught and str(caught.value) == text)
    out = capsys.readouterr().out
    assert ("failed: ranks ended with different parameters" in out) == wrong.startswith("ranks")
    for told in (out, shown(tmp_path / "script.md"), shown(tmp_path / "script.html")):
        assert bool(SPEED.search(told)) == (not text)
    assert bool(json.loads((tmp_path / "script.json").read_text())["runs"]) == (not text)
