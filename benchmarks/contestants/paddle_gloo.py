"""Paddle's own all-reduce on CPUs: paddle.distributed over Gloo."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy.typing as npt

__all__ = ["Rank", "uses_ports", "why_absent"]

uses_ports = True


def why_absent(name: str) -> str:  # noqa: ARG001 - one backend
    return "" if importlib.util.find_spec("paddle") else "Paddle is not installed (pip install paddlepaddle)"


class Rank:
    array: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:  # noqa: ARG002
        endpoints = address.split(",")
        os.environ.update(
            PADDLE_TRAINER_ID=str(rank),
            PADDLE_TRAINERS_NUM=str(nranks),
            PADDLE_TRAINER_ENDPOINTS=address,
            PADDLE_CURRENT_ENDPOINT=endpoints[rank],
            PADDLE_MASTER=endpoints[0],
            PADDLE_DISTRI_BACKEND="gloo",
        )
        import paddle
        import paddle.distributed as dist

        paddle.set_device("cpu")
        dist.init_parallel_env()
        self._paddle, self._dist = paddle, dist

    def resize(self, count: int) -> None:
        from common.system.memory import aligned_empty
        from common.tensors.flat_optimizer import as_tensor

        self.array = aligned_empty(count)
        self._tensor = as_tensor(self.array)

    def all_reduce(self) -> None:
        self._dist.all_reduce(self._tensor)

    def broadcast(self) -> None:
        self._dist.broadcast(self._tensor, 0)

    def close(self) -> None:
        self._dist.destroy_process_group()
