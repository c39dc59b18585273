"""The built-in training under PyTorch: who is absent and why, and that it computes what Paddle does."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from benchmarks.contestants.table_of_trainings import Contestant, line_up
from benchmarks.contestants.torch_training import CLASSES, TorchGroup, settings_in_torch, why_absent
from benchmarks.flags.compare import CompareConfig
from benchmarks.netlab.hosts import OneHost
from benchmarks.training.certificate import certify
from benchmarks.training.pool import WorkerPool
from benchmarks.verbs.compare import Comparison
from common.errors import GradSyncError, PeerLost, UsageError
from common.launch.flags import TrainingConfig
from common.tensors.optimizers import OPTIMIZERS, Adam, AdamW, Momentum

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")


def install(monkeypatch: pytest.MonkeyPatch, *, torch: bool) -> None:
    """Have PyTorch look installed, or not."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if torch else None)


def test_settings_have_pytorchs_names() -> None:
    adam = {"lr": 0.1, "betas": (0.8, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert settings_in_torch(Adam(learning_rate=0.1, beta1=0.8)) == adam
    assert settings_in_torch(AdamW())["weight_decay"] == 0.01
    momentum = {"lr": 0.001, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0}
    assert settings_in_torch(Momentum(use_nesterov=True)) == momentum


def test_what_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch=False)
    assert why_absent(TrainingConfig()) == "PyTorch is not installed (pip install torch)"
    assert CompareConfig().absent() == {}
    both = CompareConfig(schemes="ps,torch-ddp", optimizer="rmsprop")
    assert both.absent() == {"torch-ddp": "PyTorch is not installed (pip install torch)"}
    install(monkeypatch, torch=True)
    assert both.absent() == {"torch-ddp": "PyTorch has no optimizer that computes what Paddle's rmsprop does"}
    assert [name for name in OPTIMIZERS if why_absent(TrainingConfig(optimizer=name))] == ["rmsprop"]
    assert why_absent(TrainingConfig(model="mlp:8")) == why_absent(TrainingConfig()) == ""
    monkeypatch.delitem(importlib.import_module("benchmarks.contestants.torch_training").MODELS, "mlp")
    assert why_absent(TrainingConfig(model="mlp:8")) == "the model mlp has not been rebuilt in PyTorch"


def test_with_all_absent_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch=False)
    with pytest.raises(UsageError, match=r"^torch-ddp is absent: PyTorch is not installed \(pip install torch\)$"):
        Comparison(CompareConfig(schemes="torch-ddp"), Console(file=StringIO()))


class DistError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (DistError("x\ny"), PeerLost, "another rank was lost or late (--timeout 5 s): x"),
        (RuntimeError("Wait timeout"), PeerLost, "another rank was lost or late (--timeout 5 s): Wait timeout"),
        (
            RuntimeError("[gloo/pair.cc:1] closed"),
            PeerLost,
            "another rank was lost or late (--timeout 5 s): [gloo/pair",
        ),
        (RuntimeError("mat1 and mat2"), GradSyncError, "mat1 and mat2"),
    ],
)
def test_what_pytorch_raises_is_one_line(
    raised: RuntimeError, kind: type[GradSyncError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, distributed = ModuleType("torch"), ModuleType("torch.distributed")
    torch.distributed, distributed.DistError = distributed, DistError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    group = TorchGroup(1, 2, Path("meeting"), 5.0)
    with pytest.raises(GradSyncError) as caught, group.naming("in step 3 of 9"):
        raise raised
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"torch-ddp, rank 1 of 2, in step 3 of 9: {said}")
    assert "\n" not in str(caught.value)


@needs_torch
@pytest.mark.processes
def test_it_computes_what_paddle_does(tmp_path: Path) -> None:
    """Every optimizer, and both models; by each certificate's difference."""
    trainings = [("mlp:16,24", optimizer, [2]) for optimizer in CLASSES] + [("mnist-cnn", "adam", [1, 2])]
    found: dict[tuple[str, str, str], float] = {}
    with WorkerPool(2, 0, OneHost()) as pool:
        for model, optimizer, sizes in trainings:
            config = TrainingConfig(batch_size=8, model=model, optimizer=optimizer, lr=0.003)
            contestants = line_up(["ring", "torch-ddp"], sizes, ["shm"], [1], ["shm"])
            for peer in certify(pool, contestants, config, tmp_path, on_run=lambda what: None).peers:
                found[model, optimizer, peer.contestant] = peer.difference
    assert len(found) == len(CLASSES) + 2
    assert max(found.values()) < 2e-5, found


@needs_torch
@pytest.mark.processes
@pytest.mark.long
def test_a_rank_that_dies_is_named(wait_until: Callable[[Callable[[], object]], None]) -> None:
    config = TrainingConfig(model="mlp:8", steps=100_000, timeout=20.0)
    with WorkerPool(2, 0, OneHost()) as pool, ThreadPoolExecutor(1) as threads:
        run = threads.submit(pool.run, Contestant("torch-ddp", "gloo", 2), config, warmup_steps=0)
        wait_until(lambda: [*pool._job.scratch.glob("meeting-*")])
        os.kill(pool._torch[1].process.pid, signal.SIGKILL)
        with pytest.raises(GradSyncError, match=r"^the worker for torch rank 1 died \(exit code -9\)$"):
            run.result(timeout=60)
