"""A parameter server on Ray's actors and object store, as Ray's own example has it: workers' gradients go to the server
as objects, and the parameters come back as one. Rank 0 drives all of it; the other ranks' processes are idle.

Source of the pattern: https://docs.ray.io/en/latest/ray-core/examples/plot_parameter_server.html (synchronous)
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.contestants.table_of_sweeps import RATE

__all__ = ["Rank", "driven_by_rank_0", "restless", "why_absent"]

driven_by_rank_0 = True
restless = True  # its daemons


def why_absent(name: str) -> str:  # noqa: ARG001 - one backend
    return "" if importlib.util.find_spec("ray") else "Ray is not installed (pip install ray)"


class Server:
    """The actor that has the parameters."""

    def __init__(self, count: int) -> None:
        self.parameters = np.zeros(count, np.float32)

    def apply_gradients(self, *gradients: npt.NDArray[Any]) -> npt.NDArray[Any]:
        total = gradients[0] + gradients[1] if len(gradients) > 1 else gradients[0].copy()
        for each in gradients[2:]:
            total += each
        total *= np.float32(RATE / len(gradients))
        self.parameters -= total
        return self.parameters


class Worker:
    """The actor that is a trainer."""

    def __init__(self, count: int, rank: int) -> None:
        self.rank = rank
        self.gradients = np.zeros(count, np.float32)

    def set(self, pattern: npt.NDArray[Any]) -> None:
        np.add(pattern, self.rank, out=self.gradients)

    def compute_gradients(self, parameters: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self.parameters = parameters
        return self.gradients

    def have(self, parameters: npt.NDArray[Any]) -> int:
        self.parameters = parameters
        return parameters.size


class Rank:
    array: npt.NDArray[Any]
    parameters: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:  # noqa: ARG002
        self._rank, self._nranks = rank, nranks
        self._actors: list[Any] = []
        if rank:
            return
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self._ray = ray
        ray.init(
            num_cpus=nranks + 1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=4_000_000_000,
        )

    def resize(self, count: int) -> None:
        self.array, self.parameters = np.zeros(count, np.float32), np.zeros(count, np.float32)
        if self._rank:
            return
        for actor in self._actors:
            self._ray.kill(actor)
        self._server = self._ray.remote(Server).remote(count)
        self._workers = [self._ray.remote(Worker).remote(count, rank) for rank in range(self._nranks)]
        self._actors = [self._server, *self._workers]
        self._current = self._ray.put(np.zeros(count, np.float32))

    def changed(self) -> None:
        """The array holds other values: rank r's are to be these plus r."""
        if not self._rank:
            self._ray.get([worker.set.remote(self.array) for worker in self._workers])

    def push_pull(self) -> None:
        if self._rank:
            return
        gradients = [worker.compute_gradients.remote(self._current) for worker in self._workers]
        self._current = self._server.apply_gradients.remote(*gradients)
        self._ray.get([worker.have.remote(self._current) for worker in self._workers])
        self.parameters = self._ray.get(self._current)

    def close(self) -> None:
        if not self._rank:
            self._ray.shutdown()
