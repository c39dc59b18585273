"""Row 1, of programs of a user's own: kill -9 of any process in the middle, and under `--max-restarts` the bits are
those of the undisturbed run, and the others keep their processes. They are those of examples/resumed: MNIST with two
workers, and Fleet's ResNet-18."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from common.commit.folder import CommitFolder  # noqa: E402
from tests.faults.jobs import LAUNCHERS, Once, Start  # noqa: E402
from tests.support.commands import Started, until  # noqa: E402
from tests.support.groups import ROOT  # noqa: E402
from tests.system.test_examples import write_mnist_json  # noqa: E402

LIMIT_S = 120.0
Train = Callable[..., tuple[str, Started]]


def write_fashion(folder: Path) -> None:
    """100 images each, which Paddle's reader takes at a time."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for prefix in ("train", "t10k"):
        images, labels = random.integers(0, 256, (100, 28, 28), np.uint8), random.integers(0, 10, 100, np.uint8)
        content = {"images-idx3": struct.pack(">4I", 2051, 100, 28, 28) + images.tobytes()}
        content["labels-idx1"] = struct.pack(">2I", 2049, 100) + labels.tobytes()
        for kind, each in content.items():
            (folder / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(each))


def flags_of(program: str, folder: Path) -> list[object]:
    if program == "mnist_cnn.py":
        if not (folder / "data.gz").exists():
            write_mnist_json(folder / "data.gz")
        return ["--data", folder / "data.gz", "--epochs", 3, "--commit-every", 3]
    if not (folder / "data").exists():
        write_fashion(folder / "data")
    return ["--data-dir", folder / "data", "--batch-size", 8, "--epochs", 1, "--test-steps", 0, "--commit-every", 1]


@pytest.fixture
def train(tmp_path_factory: pytest.TempPathFactory, start: Start, monkeypatch: pytest.MonkeyPatch) -> Train:
    """The digest of what a program has saved, and what it was; somebody is killed once there is a commit."""
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")

    def train(scheme: str, program: str, kill: Callable[[Started], None] | None) -> tuple[str, Started]:
        folder = tmp_path_factory.mktemp("program")
        source = (ROOT / "examples" / "resumed" / program).read_text()
        (folder / program).write_text(source.replace("import collective as ", f"import {scheme} as "))
        kept = ["--commits", folder / "commits", "--save", folder / "saved"]
        given = [folder / program, *flags_of(program, tmp_path_factory.getbasetemp()), *kept]
        job = start(*LAUNCHERS[scheme], "--max-restarts", 1, *given)
        if kill:
            until(lambda: job.process.poll() is not None or CommitFolder(folder / "commits").steps(), "a commit")
            assert job.process.poll() is None, f"it has ended before it was to lose a process: {job.err}"
            kill(job)
        assert job.process.wait(LIMIT_S) == 0, job.err
        state = paddle.load(str(folder / "saved"))
        found = [(name, values.numpy().tobytes()) for name, values in sorted(state.items())]
        return hashlib.sha256(repr(found).encode()).hexdigest(), job

    return train


def victim(job: Started, scheme: str, who: str) -> int:
    """A launcher starts servers first, then ranks in order."""
    pid = job.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    children = [child for child in children if "launch.guard" not in Path(f"/proc/{child}/cmdline").read_text()]
    return int(children[("server", "0", "1").index(who) - (scheme == "collective")])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", ["mnist_cnn.py", "fashion_resnet18.py"])
@pytest.mark.parametrize(
    ("scheme", "who"), [("collective", "0"), ("collective", "1"), ("ps", "0"), ("ps", "1"), ("ps", "server")]
)
def test_a_program_of_ones_own_survives_a_kill(scheme: str, who: str, program: str, train: Train, once: Once) -> None:
    digest, job = train(scheme, program, lambda job: os.kill(victim(job, scheme, who), signal.SIGKILL))
    name = "server 0" if who == "server" else f"rank {who}"
    assert f"{name} was killed by SIGKILL" in job.err
    assert f"; {name} is started again (restart 1 of 1), the others go on" in job.err
    assert re.search(r"recovered: all go on after step \d+, [01] steps? replayed, ", job.err), job.err
    assert digest == once(program, lambda: train("collective", program, None)[0])
