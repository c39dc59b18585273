"""`python -m benchmarks doctor`: a line for everything, a command for what is missing, and exit code 0."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.verbs import doctor
from benchmarks.verbs.doctor import CHECKS, Finding, examine
from common.kernels import loader


def test_every_check_finds_something_and_says_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "imported", lambda code: ("3.3.1 CPU", True))
    findings = [examine(check) for check in CHECKS]
    assert len({finding.what for finding in findings}) == len(CHECKS)
    assert all(finding.found and "could not be examined" not in finding.found for finding in findings)
    assert all(finding.usable or finding.mend for finding in findings)


@pytest.mark.processes
def test_the_report_fits_80_columns_and_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "doctor"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:2] == ["Python", "ok"]
    assert lines[-1].endswith(("by", "everything."))
    for what in (
        "Paddle",
        "CPU",
        "cores",
        "memfd",
        "GPU",
        "CuPy, NCCL",
        "emulated hosts",
        "ports",
        "PyTorch",
        "MPI",
        "Ray",
    ):
        assert any(line.startswith(f"{what} ") for line in lines), what


def test_a_check_that_fails_is_a_finding() -> None:
    def broken_thing() -> Finding:
        raise OSError("on fire")

    assert examine(broken_thing) == Finding("broken thing", False, "could not be examined: OSError: on fire")


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert doctor.ports({port: "x --port"}) == Finding(
            "ports", False, f"{port} is in use", "x --port chooses another", lack="in use"
        )
    free = doctor.ports({port: "x --port"})
    assert (free.usable, free.found, free.mend) == (True, f"{port} is free", "")


def test_what_is_there_but_cannot_be_used_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "is_free", lambda port: port == 8500)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.ports,))
    doctor.doctor(doctor.DoctorConfig())
    assert " ".join(capsys.readouterr().out.splitlines()[0].split()) == "ports in use 8500 is free, 8600 is in use"


@pytest.mark.parametrize(
    ("reason", "mend"),
    [
        ("GRADSYNC_KERNELS=off", "unset GRADSYNC_KERNELS"),
        (f"{loader.NO_FOLDER}: others can write to /tmp/x", "set GRADSYNC_CACHE_DIR to a folder that you can write to"),
        ("compiling loops failed: ImportError: broken", "pip install numba"),
    ],
)
def test_without_compiled_loops_the_way_to_them_is_named(
    reason: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "why_not", lambda: reason)
    found = doctor.compiled_loops()
    assert found.found == f"NumPy does the work, with the same bits: {reason}"
    assert found.mend.startswith(mend)


@pytest.mark.parametrize(
    ("nccl", "words", "mend"),
    [
        ("22907", "NCCL 2.29.7; one rank a GPU", "pip install 'nvidia-nccl-cu12>=2.30'"),
        ("23007", "NCCL 2.30.7; several ranks may share a GPU", ""),
    ],
)
def test_nccl_says_whether_ranks_may_share_a_gpu(
    nccl: str, words: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)
    monkeypatch.setattr(doctor, "imported", lambda code: (f"13.6.0 12090 1 {nccl}", True))
    found = doctor.cupy_and_nccl()
    assert found.usable
    assert found.found == f"CuPy 13.6.0, CUDA 12.9, 1 GPU(s), {words}"
    assert found.mend.startswith(mend)
    assert bool(found.mend) == bool(mend)


def test_what_cannot_be_imported_says_why() -> None:
    assert doctor.imported("print(1); print(2)") == ("2", True)
    assert doctor.imported("import no_such_thing") == ("ModuleNotFoundError: No module named 'no_such_thing'", False)
    assert doctor.imported("import time; time.sleep(60)", 0.05) == ("importing it took longer than 0.05 s", False)


def test_too_small_shared_memory_is_named() -> None:
    found = doctor.shared_memory(1 << 60)
    assert not found.usable
    assert "--shm-size=2g" in found.mend


def test_without_root_hosts_cannot_be_emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: str(tmp_path / tool))
    found = doctor.emulated_hosts()
    assert found == Finding(
        "emulated hosts", False, "emulated hosts need root, for network namespaces", "run as root (sudo)"
    )
