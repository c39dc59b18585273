"""GradSync's own groups: shared memory (arrays made by the group, or ordinary ones), TCP and NCCL.

tcp on loopback is measured without checksums, tcp-checksum with them; tcp-ring sends short arrays round the ring too;
tcp-tls is tcp over TLS.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.contestants.encryption import encrypt_if_secure
from collective.group import connect
from collective.nccl.seat import require_nccl
from common.errors import UsageError
from common.system.memory import aligned_empty

__all__ = ["Rank", "why_absent"]


def why_absent(name: str) -> str:
    try:
        if name.startswith("nccl"):
            require_nccl("cupy")
    except UsageError as exc:
        return str(exc)
    return ""


class Rank:
    array: npt.NDArray[Any]

    def __init__(self, name: str, rank: int, nranks: int, address: str) -> None:
        encrypt_if_secure()
        self._name, self._ordinary = name, name == "shm-copied"
        self._arrays: dict[int, Any] = {}  # by size
        self.xp: Any = importlib.import_module("cupy") if name.startswith("nccl") else np
        backend, _, how = (name, "", "") if name.startswith("nccl") else name.partition("-")
        rendezvous = address.partition(",")[0] if ":" in address else f"unix-abstract:{address}"
        self._group = connect(
            rank,
            nranks,
            rendezvous,
            backend,
            algorithm="ring" if how == "ring" else "auto",
            checksum="on" if how == "checksum" else "auto",
            timeout=60.0,
        )

    def resize(self, count: int) -> None:
        if self._ordinary:
            self.array = aligned_empty(count)
        elif count in self._arrays:
            self.array = self._arrays[count]
        else:
            self.array = self._group.empty(count)
        if self._name == "shm":  # a group keeps the memory of its arrays until it closes
            self._arrays[count] = self.array

    def all_reduce(self) -> None:
        self._group.all_reduce(self.array, "sum")

    def broadcast(self) -> None:
        self._group.broadcast(self.array)

    def close(self) -> None:
        self._group.close()
