"""A parameter server on PyTorch RPC (TensorPipe), as PyTorch's tutorial on batch RPC processing has it: every trainer
sends its gradients, the last one's arrival makes the update, and all get the parameters as the answer.

Source of the pattern: https://docs.pytorch.org/tutorials/intermediate/rpc_async_execution.html
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.contestants.table_of_sweeps import RATE

__all__ = ["SERVER", "Rank", "main", "uses_ports", "why_absent"]

SERVER = "benchmarks.contestants.torch_rpc"
uses_ports = True
NAME = "server"


def why_absent(name: str) -> str:  # noqa: ARG001 - one backend
    return "" if importlib.util.find_spec("torch") else "PyTorch is not installed (pip install torch)"


class Parameters:
    """Lives in the server's process; `push_pull` runs there."""

    lock = threading.Lock()
    model: Any = None
    total: Any = None
    arrived = 0
    answer: Any = None

    @classmethod
    def push_pull(cls, gradients: Any, nranks: int) -> Any:
        import torch

        with cls.lock:
            if cls.model is None or cls.model.numel() != gradients.numel():
                cls.model, cls.total = torch.zeros_like(gradients), torch.zeros_like(gradients)
            if cls.arrived == 0:
                cls.answer = torch.futures.Future()
                cls.total.zero_()
            answer = cls.answer
            cls.total += gradients
            cls.arrived += 1
            if cls.arrived == nranks:
                cls.arrived = 0
                cls.model.add_(cls.total, alpha=-RATE / nranks)
                answer.set_result(cls.model)
        return answer


def remote_push_pull(gradients: Any, nranks: int) -> Any:
    return Parameters.push_pull(gradients, nranks)


def join(name: str, number: int, nranks: int, address: str) -> Any:
    import torch
    from torch.distributed import rpc

    global remote_push_pull  # under its own name, by which it is pickled, and which may not need PyTorch on import
    remote_push_pull = rpc.functions.async_execution(remote_push_pull)
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{address}", rpc_timeout=120)
    rpc.init_rpc(name, rank=number, world_size=nranks + 1, rpc_backend_options=options)
    return rpc


class Rank:
    array: npt.NDArray[Any]
    parameters: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:  # noqa: ARG002
        import torch

        self._rpc, self._torch, self._nranks = join(f"rank{rank}", rank + 1, nranks, address), torch, nranks

    def resize(self, count: int) -> None:
        self.array = np.zeros(count, np.float32)
        self._tensor = self._torch.from_numpy(self.array)
        self.parameters = np.zeros(count, np.float32)

    def push_pull(self) -> None:
        answer = self._rpc.rpc_sync(NAME, remote_push_pull, args=(self._tensor, self._nranks))
        self.parameters = answer.numpy()

    def close(self) -> None:
        self._rpc.shutdown()


def main() -> int:
    address, _, nranks, _ = sys.argv[1:]
    from benchmarks.contestants import torch_rpc  # under the name that the trainers' pickles have

    torch_rpc.join(NAME, 0, int(nranks), address).shutdown()  # which waits for all trainers to shut down
    return 0


if __name__ == "__main__":
    sys.exit(main())
