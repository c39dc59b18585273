"""MPI's all-reduce, through mpi4py; the MPI itself comes from the system (OpenMPI: `mpirun --oversubscribe`)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Rank", "launch", "why_absent"]


def why_absent(name: str) -> str:  # noqa: ARG001 - one backend
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is not installed (pip install mpi4py)"
    return "" if shutil.which("mpirun") else "there is no mpirun (apt-get install openmpi-bin libopenmpi-dev)"


def launch(nranks: int) -> list[str]:
    """The command that starts all ranks, before the Python command of each."""
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-n", str(nranks)]


class Rank:
    array: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:  # noqa: ARG002
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD

    def resize(self, count: int) -> None:
        self.array = np.empty(count, np.float32)

    def all_reduce(self) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, self.array, self._mpi.SUM)

    def broadcast(self) -> None:
        self._world.Bcast(self.array)

    def close(self) -> None:
        self._mpi.Finalize()
