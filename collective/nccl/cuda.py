"""One GPU through CuPy: a stream of our own, its order after whoever made the data, and memory on both sides."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from collective.call_tags import Array
from collective.nccl.binding import INSTALL
from common.errors import NcclFailed, UsageError
from common.system.memory import ALIGNMENT_BYTES

__all__ = ["Gpu", "count_gpus", "pick_gpu"]

CPU, CUDA = 1, 2  # kinds of device in DLPack
SUCCESS, NOT_READY = 0, 600  # cudaError_t of a query
SELECTED_VARIABLE = "FLAGS_selected_gpus"  # Paddle's, set by launchers that were given --devices


class Gpu:
    """A context manager: within, CuPy works on this GPU and on our stream, from whichever thread.

    The stream is non-blocking: it runs beside all others, the default one included, and is ordered after the caller's
    by an event (`follow_caller`). Nothing here waits for the whole device.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.xp = importlib.import_module("cupy")
        self._cuda = self.xp.cuda
        self._device = self._cuda.Device(index)
        with self._device:
            self.stream = self._cuda.Stream(non_blocking=True)
            self._before, self._after = (self._cuda.Event(disable_timing=True) for _ in range(2))
        self._pinned: list[tuple[int, int]] = []  # addresses of what `pinned` made: first, end

    @property
    def identity(self) -> str:
        """Equal for two processes if they use the same GPU of the same host."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        host = boot.read_text().strip() if boot.exists() else ""
        return f"{socket.gethostname()} {host} {self._cuda.runtime.deviceGetPCIBusId(self.index)}"

    def __enter__(self) -> Gpu:
        self._device.__enter__()
        self.stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.__exit__(*error)
        self._device.__exit__(*error)

    def follow_caller(self) -> None:
        """Let our stream wait, on the GPU, for all that the calling thread's current CuPy stream has been given."""
        with self._device:
            self._before.record(self._cuda.get_current_stream(self.index))
            self.stream.wait_event(self._before)

    def mark(self) -> None:
        """Remember this point of our stream for `done`; within the context."""
        self._after.record(self.stream)

    def done(self) -> bool:
        """Whether the GPU has come to the mark.

        Raises:
            NcclFailed: a kernel failed, as on an illegal address.
        """
        status = self._cuda.runtime.eventQuery(self._after.ptr)
        if status not in (SUCCESS, NOT_READY):
            raise NcclFailed(f"CUDA error {status} on GPU {self.index} in a collective operation")
        return bool(status == SUCCESS)

    def holds(self, array: Any) -> bool:
        return isinstance(array, self.xp.ndarray)

    def adopt(self, array: Any) -> Any:
        """The memory of any DLPack producer (Paddle, PyTorch, JAX, ...) as a CuPy or NumPy array; the producer is asked
        to order its work before the caller's current CuPy stream.

        Raises:
            TypeError: it is none. ValueError: it lies on another GPU.
        """
        if not self.holds(array):
            try:
                kind, _ = array.__dlpack_device__()
                if kind == CPU:
                    return np.from_dlpack(array)
                array = self.xp.from_dlpack(array) if kind == CUDA else None
            except (AttributeError, BufferError, RuntimeError) as exc:
                why = f": {exc}" if not isinstance(exc, AttributeError) else ""
                raise TypeError(
                    f"array must be of NumPy, CuPy or a DLPack producer (got {type(array).__name__}{why})"
                ) from exc
        if array is None or array.device.id != self.index:
            raise ValueError(
                f"array must lie on GPU {self.index}, as the group does, or on the host (got another place)"
            )
        return array

    def empty(self, count: int, dtype: npt.DTypeLike) -> Any:
        with self._device:
            return self.xp.empty(count, dtype)

    def pinned(self, count: int, dtype: npt.DTypeLike) -> Array:
        """An uninitialised NumPy array, 64-byte aligned, that the GPU copies from and to directly."""
        kind = np.dtype(dtype)
        nbytes = count * kind.itemsize
        with self._device:
            memory = self._cuda.alloc_pinned_memory(nbytes + ALIGNMENT_BYTES)
        raw = np.frombuffer(memory, np.uint8, nbytes + ALIGNMENT_BYTES)
        skip = -raw.ctypes.data % ALIGNMENT_BYTES
        self._pinned.append((raw.ctypes.data, raw.ctypes.data + raw.nbytes))
        return raw[skip : skip + nbytes].view(kind)

    def is_pinned(self, array: Array) -> bool:
        at = array.ctypes.data
        return any(first <= at and at + array.nbytes <= end for first, end in self._pinned)

    def upload(self, pinned: Array, array: Any) -> None:
        """Copy to the GPU, on our stream."""
        array.data.copy_from_host_async(pinned.ctypes.data, pinned.nbytes, self.stream)

    def download(self, array: Any, pinned: Array) -> None:
        """Copy from the GPU, on our stream."""
        array.data.copy_to_host_async(pinned.ctypes.data, pinned.nbytes, self.stream)


def count_gpus() -> int:
    """How many GPUs this process sees; 0 without CuPy or a driver."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return int(importlib.import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception:  # ImportError, or CuPy's error for "no driver" and "no device"
        return 0


def pick_gpu(device: str, rank: int) -> int:
    """The index of the GPU that `device` names; for "auto" and "cpu" the launcher's choice, or by the local rank.

    Raises:
        UsageError: there is none, or not that one.
    """
    count = count_gpus()
    if not importlib.util.find_spec("cupy"):
        raise UsageError(f"NCCL needs CuPy, which is not installed; {INSTALL}, or use --backend shm or tcp")
    if not count:
        raise UsageError(
            "NCCL needs a CUDA GPU, and CuPy sees none; look at nvidia-smi and CUDA_VISIBLE_DEVICES, "
            "or use --backend shm or tcp"
        )
    selected = os.environ.get(SELECTED_VARIABLE, "")
    if not device.startswith("gpu:") and not selected.isdigit():
        return int(os.environ.get("PADDLE_LOCAL_RANK") or rank) % count
    index = int(device[4:] if device.startswith("gpu:") else selected)
    if index >= count:
        raise UsageError(f"there is no GPU {index}: this process sees {count}, numbered from 0")
    return index
