"""PyTorch's all-reduce on CPUs: torch.distributed over Gloo."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Rank", "uses_ports", "why_absent"]

uses_ports = True


def why_absent(name: str) -> str:  # noqa: ARG001 - one backend
    return "" if importlib.util.find_spec("torch") else "PyTorch is not installed (pip install torch)"


class Rank:
    array: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:  # noqa: ARG002
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://{address.partition(',')[0]}", rank=rank, world_size=nranks)
        self._torch, self._dist = torch, dist

    def resize(self, count: int) -> None:
        self.array = np.empty(count, np.float32)
        self._tensor = self._torch.from_numpy(self.array)

    def all_reduce(self) -> None:
        self._dist.all_reduce(self._tensor)

    def broadcast(self) -> None:
        self._dist.broadcast(self._tensor, 0)

    def close(self) -> None:
        self._dist.destroy_process_group()
