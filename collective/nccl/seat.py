"""How a rank prepares for NCCL before the group meets, and what it does with what the others told."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from collective.membership.liveness import Mesh
from collective.nccl.algorithm import NcclAlgorithm
from collective.nccl.binding import load_binding, words
from collective.nccl.cuda import Gpu, count_gpus, pick_gpu
from common.errors import ProtocolError, UsageError

__all__ = ["DEVICES", "SHARING", "SHARING_VERSION", "NcclSeat", "check_device", "gpus_for", "require_nccl"]

DEVICES = "auto, cpu or gpu:K, as in gpu:0"
SHARING_VERSION = 23000  # NCCL 2.30.0 is the first that lets ranks share a GPU
SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
}  # few blocks, so that all ranks' kernels fit at once


class NcclSeat:
    """One rank's binding and GPU, before there is a group.

    Args:
        device: "gpu:K"; "auto": a GPU by local rank; "cpu": likewise, but `Group.empty` gives pinned host arrays.
        local: all ranks are on this host, so NCCL need not listen to others.

    Raises:
        UsageError: CuPy, NCCL, pynccl or the GPU is missing; the message says which, and what to install.
    """

    def __init__(self, rank: int, device: str, binding: str, *, local: bool) -> None:
        self._on_host = device == "cpu"
        self._binding = load_binding(binding)
        self._gpu = Gpu(pick_gpu(device, rank))
        if local:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        identity = self._binding.unique_id().hex() if rank == 0 else ""
        self.plan = f"through NCCL {words(self._binding.version)}"
        self.note = json.dumps({"id": identity, "gpu": self._gpu.identity}).encode()

    def join(self, mesh: Mesh, notes: Sequence[bytes], *, ring: bool) -> NcclAlgorithm:
        """Initialise NCCL with the other ranks; `notes` are those of all seats.

        Raises:
            UsageError: ranks share a GPU and this NCCL does not let them. PeerLost, PeerStalled, NcclFailed.
        """
        told = [read_note(rank, note) for rank, note in enumerate(notes)]
        if shared := sharing([each.gpu for each in told]):
            if self._binding.version < SHARING_VERSION:
                mesh.close()  # every rank says so by itself
                raise UsageError(
                    f"ranks {' and '.join(map(str, shared))} share a GPU, which NCCL {words(self._binding.version)} "
                    "refuses; give each rank its own GPU, or pip install 'nvidia-nccl-cu12>=2.30' (CUDA 13: -cu13)"
                )
            for name, value in SHARING.items():
                os.environ.setdefault(name, value)
        identity = bytes.fromhex(told[0].id)
        return NcclAlgorithm(self._binding, self._gpu, mesh, len(told), identity, ring=ring, on_host=self._on_host)


class Note(Struct, frozen=True):
    """What a rank tells all others: NCCL's unique id, in hexadecimal, if it is rank 0, and which GPU it has."""

    id: Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=4096)]
    gpu: Annotated[str, Meta(max_length=4096)]


def read_note(rank: int, note: bytes) -> Note:
    """
    Raises:
        ProtocolError: it is none.
    """
    try:
        return msgspec.json.decode(note, type=Note)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"rank {rank} told nothing of its GPU that can be read: {exc}") from exc


def sharing(gpus: Sequence[str]) -> list[int]:
    """The ranks on the first GPU that has more than one; none if each has its own."""
    crowded = next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)
    return [rank for rank, gpu in enumerate(gpus) if gpu == crowded]


def check_device(device: str) -> None:
    """Raise UsageError unless it is one of DEVICES."""
    if device not in ("auto", "cpu") and not (device.startswith("gpu:") and device[4:].isdigit()):
        raise UsageError(f"unknown device {device!r}; expected {DEVICES}")


def require_nccl(binding: str) -> None:
    """Raise UsageError, saying what is missing, unless a rank could use NCCL here; for launchers."""
    load_binding(binding)
    pick_gpu("auto", 0)


def gpus_for(ranks: int, binding: str) -> str:
    """Why `ranks` ranks of this host cannot have a GPU each and NCCL; "" if they can."""
    if (count := count_gpus()) < ranks:
        return f"{count or 'no'} GPU{'s' * (count > 1)} for {ranks} rank{'s' * (ranks > 1)}"
    try:
        load_binding(binding)
    except UsageError as exc:
        return str(exc)
    return ""
