"""PyTorch's all-reduce on GPUs: torch.distributed over NCCL."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from typing import Any

import numpy.typing as npt

from collective.nccl.binding import words
from collective.nccl.seat import SHARING, SHARING_VERSION

__all__ = ["Rank", "uses_ports", "why_absent"]

uses_ports = True


def why_absent(name: str) -> str:  # noqa: ARG001 - one backend
    for package in ("torch", "cupy"):
        if not importlib.util.find_spec(package):
            return f"{package} is not installed (pip install torch cupy-cuda12x)"
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU (install one built for CUDA)"
    if torch.cuda.device_count() == 1 and (version := loaded_version()) < SHARING_VERSION:
        return f"one GPU, which PyTorch's NCCL {words(version)} lets no ranks share (LD_PRELOAD one >= 2.30)"
    return ""


def loaded_version() -> int:
    """Of the NCCL that PyTorch, which is imported, calls. `torch.cuda.nccl.version` is the one it was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


class Rank:
    array: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:  # noqa: ARG002
        import torch
        import torch.distributed as dist

        count = torch.cuda.device_count()
        if nranks > count:
            os.environ.update(SHARING)
        self._device = torch.device("cuda", rank % count)
        torch.cuda.set_device(self._device)
        first = address.partition(",")[0]
        dist.init_process_group(
            "nccl", init_method=f"tcp://{first}", rank=rank, world_size=nranks, device_id=self._device
        )
        self._torch, self._dist, self.xp = torch, dist, importlib.import_module("cupy")
        self.xp.cuda.Device(rank % count).use()

    def resize(self, count: int) -> None:
        self._tensor = self._torch.empty(count, dtype=self._torch.float32, device=self._device)
        self.array = self.xp.from_dlpack(self._tensor)

    def all_reduce(self) -> None:
        self._dist.all_reduce(self._tensor)
        self._torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._dist.destroy_process_group()
