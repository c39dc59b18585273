"""The tutorials' programs: before and after differ in the import only, and both schemes end in the same bits."""

from __future__ import annotations

import ast
import difflib
import gzip
import io
import json
import os
import pickle
import re
import runpy
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.support import warm
from tests.support.groups import ROOT

pytest.importorskip("paddle")

EXAMPLES = ROOT / "examples"
NAMES = sorted(p.name for p in (EXAMPLES / "before").glob("*.py"))


def changed_lines(name: str) -> list[tuple[str, str]]:
    """(before, after) of every changed line outside the docstring."""
    texts = [(EXAMPLES / side / name).read_text() for side in ("before", "after")]
    first = [ast.parse(text).body[0].end_lineno or 0 for text in texts]
    before, after = (text.splitlines()[n:] for text, n in zip(texts, first, strict=True))
    assert len(before) == len(after)
    return [(a, b) for a, b in zip(before, after, strict=True) if a != b]


def test_the_page_on_arrays_shows_the_example_and_it_runs() -> None:
    source = (EXAMPLES / "all_reduce.py").read_text().partition('"""\n\n')[2]
    for name in ("arrays.md", "arrays.zh.md"):
        shown = [line.partition("  #")[0] for line in (EXAMPLES.parent / "docs" / name).read_text().splitlines()]
        for line in filter(None, source.splitlines()):
            assert line.partition("  #")[0] in shown
    command = [sys.executable, "-m", "collective.run", "--nranks", "4", str(EXAMPLES / "all_reduce.py")]
    done = warm.run(command, timeout=110)
    assert (done.returncode, done.stdout) == (0, "rank 0 of 4: the mean is 1.5\n"), done.stderr


def test_the_example_on_arrays_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSYNC_RENDEZVOUS", raising=False)
    with pytest.raises(SystemExit) as found:
        runpy.run_path(str(EXAMPLES / "all_reduce.py"), run_name="__main__")
    told = "start it with a launcher: python -m collective.run --nranks 4 examples/all_reduce.py"
    assert found.value.code == told
    assert told.partition(": ")[2] in (EXAMPLES / "all_reduce.py").read_text().partition("import os")[0]


def test_there_are_four_pairs() -> None:
    assert NAMES == ["cifar10_cnn.py", "fashion_resnet18.py", "fleet_parameter_server.py", "mnist_cnn.py"]
    assert sorted(p.name for p in (EXAMPLES / "after").glob("*.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_only_the_import_changes(name: str) -> None:
    changes = changed_lines(name)
    assert changes
    for before, after in changes:
        if "DataParallel(" in before:
            assert before.replace("paddle.DataParallel(", "dist.DataParallel(") == after
        else:
            assert before in ("import paddle.distributed as dist", "from paddle.distributed import fleet")
            assert after.split()[0] == "import"
            assert after.split()[1] in ("ps", "collective")
            assert after.split()[2:] == before.split()[-2:] or after.split()[-1] == before.split()[-1]


def write_mnist_json(path: Path) -> None:
    random = np.random.default_rng(0)

    def part(count: int) -> list[object]:
        return [random.random((count, 784)).round(3).tolist(), random.integers(0, 10, count).tolist()]

    with gzip.open(path, "wt", compresslevel=1) as file:
        json.dump([part(800), part(10), part(200)], file)


def write_cifar_archive(path: Path) -> None:
    random = np.random.default_rng(0)
    with tarfile.open(path, "w:gz") as archive:
        for name in ("data_batch_1", "data_batch_2", "test_batch"):
            data = random.integers(0, 256, (160, 3072), np.uint8)
            content = pickle.dumps({b"data": data, b"labels": random.integers(0, 10, 160).tolist()}, protocol=2)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def digest(scheme: str, nranks: int, program: Path, folder: Path, *flags: str) -> str:
    """Run a program (its imports redirected) and return the one digest that all ranks end with."""
    worker = ROOT / "benchmarks" / "training" / "script_worker.py"
    module = {"ps": "ps.run", "collective": "collective.run"}[scheme]
    command = ["-m", module, "--nranks", str(nranks), "--log-dir", str(folder / scheme), str(worker), scheme]
    done = warm.run(
        [sys.executable, *command, str(folder / f"{scheme}-record"), str(program), *flags],
        timeout=110,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads((folder / f"{scheme}-record.{rank}.json").read_text()) for rank in range(nranks)]
    assert len({record["parameters_sha256"] for record in records}) == 1
    return str(records[0]["parameters_sha256"])


@pytest.mark.parametrize("page", ["own-program.md", "own-program.zh.md"])
def test_the_page_makes_the_file_of_mnist(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (100, 28, 28), np.uint8)
    files = {"images": struct.pack(">4I", 2051, 100, 28, 28) + images.tobytes()}
    files["labels"] = struct.pack(">2I", 2049, 100) + bytes(range(10)) * 10
    for kind, content in files.items():
        (tmp_path / kind).write_bytes(gzip.compress(content))
    monkeypatch.setattr(
        "paddle.vision.datasets.mnist._check_exists_and_download",
        lambda path, url, *rest: str(tmp_path / ("images" if "images" in url else "labels")),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES / "before"))
    (code,) = re.findall(r"```python\n(import gzip.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    exec(code, {})
    import mnist_cnn

    train, validation, test = (mnist_cnn.MnistDataset("mnist.json.gz", part) for part in range(3))
    assert (len(train), len(validation), len(test)) == (100, 0, 100)
    image, label = train[13]
    assert np.allclose(image[0], images[13] / 255, atol=1e-4)
    assert label.tolist() == [3]


@pytest.mark.parametrize("name", ["cifar10_cnn.py", "fashion_resnet18.py", "mnist_cnn.py"])
def test_a_missing_file_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit) as found:
        runpy.run_path(str(EXAMPLES / "before" / name), run_name="__main__")
    assert re.fullmatch(r"no such (file|folder): \S+; docs/own-program.md says (how|where) .+", str(found.value))


@pytest.mark.processes
@pytest.mark.parametrize(
    "sampler", ["--distributed-sampler", pytest.param("--no-distributed-sampler", marks=pytest.mark.long)]
)
def test_mnist_ends_in_the_same_bits(tmp_path: Path, sampler: str) -> None:
    write_mnist_json(tmp_path / "mnist.json.gz")
    flags = ["--data", str(tmp_path / "mnist.json.gz"), "--steps", "3", "--save", str(tmp_path / "m.pdparams"), sampler]
    program = EXAMPLES / "before" / "mnist_cnn.py"
    assert digest("ps", 2, program, tmp_path, *flags) == digest("collective", 2, program, tmp_path, *flags)
    assert (tmp_path / "m.pdparams").exists()


@pytest.mark.long
@pytest.mark.processes
def test_cifar10_ends_in_the_same_bits(tmp_path: Path) -> None:
    write_cifar_archive(tmp_path / "c.tar.gz")
    flags = ["--data", str(tmp_path / "c.tar.gz"), "--steps", "3", "--save", str(tmp_path / "c.pdparams")]
    program = EXAMPLES / "before" / "cifar10_cnn.py"
    assert digest("ps", 2, program, tmp_path, *flags) == digest("collective", 2, program, tmp_path, *flags)


def test_cifar10_reads_arrays_only(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES / "before"))
    try:
        import cifar10_cnn
    finally:
        sys.path.pop(0)
    write_cifar_archive(tmp_path / "good.tar.gz")
    images, labels = cifar10_cnn.read_archive(tmp_path / "good.tar.gz", "data_batch")
    assert images.shape == (320, 3, 32, 32)
    assert labels.shape == (320, 1)
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> object:
            return (Path.touch, (canary,))

    content = pickle.dumps({b"data": Evil(), b"labels": []})
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("data_batch_1")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        cifar10_cnn.read_archive(tmp_path / "bad.tar.gz", "data_batch")
    assert not canary.exists()


def run_after(module: list[str], program: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, "-m", *module, str(EXAMPLES / "after" / program), *flags],
        timeout=110,
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    "launcher",
    [
        ["ps.run", "--trainers", "2", "--servers", "2"],
        pytest.param(
            [
                "paddle.distributed.launch",
                *["--run_mode=ps", "--server_num", "2", "--trainer_num", "2", "--log_dir", "log"],
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=["ps.run", "paddle.distributed.launch"],
)
def test_the_parameter_server_program_runs_and_ends(tmp_path: Path, launcher: list[str]) -> None:
    done = run_after(launcher, "fleet_parameter_server.py", tmp_path)
    assert done.returncode == 0, done.stderr
    logs = done.stdout + "".join(p.read_text() for p in tmp_path.glob("log/workerlog.0"))
    assert "found weight [3.0, -2.0] bias [1.0]" in logs
    assert (tmp_path / "line.pdparams").exists()


def test_the_difference_is_small_to_a_reader_too() -> None:
    for name in NAMES:
        before, after = ((EXAMPLES / side / name).read_text().splitlines() for side in ("before", "after"))
        changed = [line for line in difflib.ndiff(before, after) if line.startswith(("+ ", "- "))]
        assert len(changed) <= 6
