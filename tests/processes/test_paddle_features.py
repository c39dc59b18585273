"""What users expect of Paddle beside data parallelism gives unchanged Paddle's bits under both schemes: DataLoader's
workers, AMP, resuming, evaluation and metrics, accumulation, recomputation, schedulers, two optimizers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from tests.processes.test_server_updates import run  # noqa: E402
from tests.support.groups import ROOT  # noqa: E402
from tests.support.warm import COLD_VARIABLE  # noqa: E402

PROGRAM = ROOT / "tests" / "programs" / "features.py"
SCHEMES = ("ps", "collective", "paddle")

pytestmark = pytest.mark.processes


def outcome(scheme: str, folder: Path, *arguments: str) -> tuple[list[str], str]:
    """Its RESULT lines and everything it said; ps has two servers."""
    code, results, said = run(scheme, PROGRAM, folder, *arguments, servers=2)
    assert code == 0, said
    assert {line.split()[0] for line in results} == {"0", "1"}, said
    return results, said


@pytest.mark.longest
def test_data_loaders_with_workers_evaluation_and_metrics_in_mid_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are forked beside the threads of gRPC and of the ring; with shared memory, without, and left early."""
    monkeypatch.setenv(COLD_VARIABLE, "1")  # what removes Paddle's segments is an interpreter's own end
    found = {scheme: outcome(scheme, tmp_path, "epochs") for scheme in SCHEMES}
    assert len(found["ps"][0]) == 16
    assert found["ps"][0] == found["collective"][0] == found["paddle"][0]
    for scheme in ("ps", "collective"):
        said = found[scheme][1]
        assert "gradsync:" not in said  # servers update
        noted = [line.split() for line in re.findall(r"^NOTE processes (.*)$", said, re.MULTILINE)]
        assert [len(pids) for pids in noted] == [1 + 6, 1 + 6]  # a rank, and two workers in each of three epochs
        for pid in [*noted[0], *noted[1]]:
            assert not runs_the_program(pid)
            assert not [path for path in Path("/dev/shm").iterdir() if pid in re.findall(r"\d+", path.name)]


def runs_the_program(pid: str) -> bool:
    try:
        return str(PROGRAM).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.long
def test_amp_accumulation_recomputation_and_a_plateau(tmp_path: Path) -> None:
    """Paddle switches AMP and its scaler off on a CPU, which is not to be noticed."""
    found = {s: outcome(s, tmp_path, "accumulation", *["plain"] * (s == "paddle")) for s in SCHEMES}
    assert len(found["ps"][0]) == 14
    assert found["ps"][0] == found["collective"][0] == found["paddle"][0]
    assert "gradsync:" not in found["ps"][1]
    rates = [line.split()[3] for line in found["ps"][0] if line.startswith("0")]
    assert len(set(rates)) > 1  # a plateau was met


@pytest.mark.long
def test_two_optimizers_over_two_halves_of_one_model(tmp_path: Path) -> None:
    found = {scheme: outcome(scheme, tmp_path, "halves") for scheme in SCHEMES}
    assert len(found["ps"][0]) == 12
    assert found["ps"][0] == found["collective"][0] == found["paddle"][0]
    words = "gradsync: the trainers update, not the servers: the optimizer has 8 of the model's 10 parameters"
    assert found["ps"][1].count(words) == 1
    assert "gradsync:" not in found["collective"][1]


@pytest.mark.long
def test_a_run_that_resumes_equals_one_that_was_not_interrupted_under_the_other_scheme_too(tmp_path: Path) -> None:
    saved = {scheme: str(tmp_path / f"saved by {scheme}") for scheme in SCHEMES}
    whole = {scheme: outcome(scheme, tmp_path, "resume", saved[scheme], "0", "10")[0] for scheme in SCHEMES}
    assert len(whole["ps"]) == 2 * (5 + 1)
    assert whole["ps"] == whole["collective"] == whole["paddle"]
    assert contents(saved["ps"]) == contents(saved["collective"]) == contents(saved["paddle"])
    for scheme, other in [("ps", "collective"), ("collective", "ps")]:  # what both saved is the same
        results, said = outcome(scheme, tmp_path, "resume", saved[other], "5", "10")
        assert results == whole["ps"], said
        assert "gradsync:" not in said


def contents(folder: str) -> list[tuple[str, Any]]:
    """Keys and bits of a checkpoint, in their order."""
    files = [paddle.load(f"{folder}/{name}") for name in ("model.pdparams", "optimizer.pdopt")]
    return [
        (key, np.asarray(value).tobytes() if hasattr(value, "shape") else value)
        for state in files
        for key, value in state.items()
    ]
