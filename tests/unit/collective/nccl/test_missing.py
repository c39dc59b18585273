"""What is not installed, or does not go together, is one line."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import collective
from collective.flags import RingSettings
from collective.nccl import cuda
from collective.nccl.binding import INSTALL, load_binding, show_pynccl_the_library
from common.errors import UsageError
from tests.support.groups import ROOT


def test_each_missing_part_is_one_line(monkeypatch):
    with pytest.raises(UsageError, match="unknown NCCL binding 'cpy'; did you mean 'cupy'"):
        load_binding("cpy")

    def without(name):
        def load(wanted):
            if wanted.startswith(name):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return SimpleNamespace(__version__="14.2.0", available=False)

        return load

    for binding, missing in (("cupy", "cupy"), ("pynccl", "pynccl"), ("pynccl", "numba")):
        monkeypatch.setattr(importlib, "import_module", without(missing if missing != "numba" else "pynccl"))
        with pytest.raises(UsageError) as caught:
            load_binding(binding)
        assert str(caught.value).startswith(f"NCCL through {binding} needs {caught.value.__cause__.name}, which is not")
        assert str(caught.value).endswith(INSTALL)
    monkeypatch.setattr(importlib, "import_module", without("nothing"))
    with pytest.raises(UsageError, match=r"CuPy finds no NCCL library \(libnccl.so.2\); pip install"):
        load_binding("cupy")


def test_pynccl_without_a_library_says_which_variable_helps(monkeypatch):
    def libnccl():
        raise Exception("Cannot open library for nccl:\nlibrary nccl not found")

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(libnccl=libnccl))
    text = r"pynccl cannot load NCCL \(Cannot open library for nccl:\); NUMBA_NCCLLIB names the folder of libnccl.so.2"
    with pytest.raises(UsageError, match=text):
        load_binding("pynccl")


def test_pynccl_is_shown_the_library_that_pip_installed(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl.so.2").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "nvidia.nccl" else None)
    for told, expected in ((None, str(tmp_path / "lib")), ("/theirs", "/theirs")):
        monkeypatch.delenv("NUMBA_NCCLLIB", raising=False)
        if told:
            monkeypatch.setenv("NUMBA_NCCLLIB", told)
        show_pynccl_the_library()
        assert os.environ["NUMBA_NCCLLIB"] == expected


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "NCCL needs CuPy, which is not installed; pip install cupy-cuda12x"),
        ("cupy", "NCCL needs a CUDA GPU, and CuPy sees none; look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_machine_without_gpu_or_cupy_says_so(monkeypatch, found, text):
    monkeypatch.setattr(cuda, "count_gpus", lambda: 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(UsageError) as caught:
        cuda.pick_gpu("auto", 0)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("device", "rank", "environment", "index"),
    [
        ("auto", 0, {}, 0),
        ("cpu", 3, {}, 1),
        ("auto", 3, {"PADDLE_LOCAL_RANK": "0"}, 0),
        ("auto", 0, {"FLAGS_selected_gpus": "1", "PADDLE_LOCAL_RANK": "0"}, 1),
        ("gpu:1", 0, {"FLAGS_selected_gpus": "0"}, 1),
    ],
)
def test_which_gpu_is_a_ranks(monkeypatch, device, rank, environment, index):
    for name in ("PADDLE_LOCAL_RANK", "FLAGS_selected_gpus"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda, "count_gpus", lambda: 2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert cuda.pick_gpu(device, rank) == index
    with pytest.raises(UsageError, match="there is no GPU 2: this process sees 2, numbered from 0"):
        cuda.pick_gpu("gpu:2", 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"backend": "shm", "device": "gpu:0"}, "backend shm works on the host's memory, not on gpu:0; use nccl"),
        ({"backend": "tcp", "device": "gpu:0"}, "backend tcp works on the host's memory"),
        ({"device": "gpu"}, "unknown device 'gpu'; expected auto, cpu or gpu:K, as in gpu:0"),
        ({"backend": "nccl", "algorithm": "direct"}, "algorithm direct is for the host's memory"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, text):
    with pytest.raises(UsageError, match=text):
        collective.connect(0, 2, **arguments)


@pytest.mark.parametrize("device", ["gpu", "gpu:0", "auto", "cup"])
def test_a_training_refuses_every_device_but_the_one_that_works(device):
    RingSettings(device="cpu")
    with pytest.raises(UsageError, match=f"^--device {device}: only cpu works, training on the GPU is not built yet"):
        RingSettings(device=device)


@pytest.mark.skipif(cuda.count_gpus() > 0, reason="this machine has a GPU")
@pytest.mark.parametrize("backend", ["nccl", "nccl-ring"])
def test_the_launcher_refuses_in_one_line(backend):
    done = subprocess.run(
        [sys.executable, "-m", "collective.run", "--backend", backend],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "UsageError: " in done.stderr
    assert ("pip install cupy-cuda12x" in done.stderr) or ("CuPy sees none" in done.stderr)
