"""What Gpu asks of CuPy, and in which order, over a recording double; the real one is for tests/gpu."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from collective.nccl import cuda
from common.errors import NcclFailed


class Recorder:
    """The module cupy as far as Gpu uses it: every call is written down."""

    class ndarray:  # noqa: N801  (CuPy's name)
        def __init__(self, at, said):
            self.device, self._said = SimpleNamespace(id=at), said

        @property
        def data(self):
            def copy(kind):
                return lambda address, nbytes, stream: self._said.append((kind, address, nbytes, stream.name))

            return SimpleNamespace(copy_from_host_async=copy("up"), copy_to_host_async=copy("down"))

    def __init__(self):
        self.said, self.status, self.caller = [], 600, Stream("caller", self)
        self.cuda = SimpleNamespace(
            Device=lambda index: Entered(f"device {index}", self),
            Stream=lambda non_blocking: Stream(f"ours, non_blocking={non_blocking}", self),
            Event=lambda disable_timing: Event(self),
            get_current_stream=lambda index: self.caller,
            alloc_pinned_memory=lambda nbytes: bytearray(nbytes),
            runtime=SimpleNamespace(
                eventQuery=lambda event: self.status, deviceGetPCIBusId=lambda index: f"0000:0{index}:00.0"
            ),
        )

    def empty(self, count, dtype):
        self.said.append(("empty", count, dtype))

    def from_dlpack(self, tensor):
        self.said.append("from_dlpack")
        return self.ndarray(tensor.device_id, self.said)


class Entered:
    def __init__(self, name, recorder):
        self.name, self.recorder = name, recorder

    def __enter__(self):
        self.recorder.said.append(f"enter {self.name}")

    def __exit__(self, *_):
        self.recorder.said.append(f"leave {self.name}")


class Stream(Entered):
    ptr = 7

    def wait_event(self, event):
        self.recorder.said.append(f"{self.name} waits for {event.number}")


class Event:
    made = 0

    def __init__(self, recorder):
        self.recorder, self.ptr = recorder, 9
        Event.made += 1
        self.number = Event.made % 2

    def record(self, stream):
        self.recorder.said.append(f"{self.number} on {stream.name}")


class Tensor:
    def __init__(self, kind, device_id=3):
        self.kind, self.device_id = kind, device_id

    def __dlpack_device__(self):
        return self.kind, self.device_id

    def __dlpack__(self, **options):
        return np.arange(3.0).__dlpack__(**options)


@pytest.fixture
def gpu_and_cupy(monkeypatch):
    cupy = Recorder()
    monkeypatch.setattr(importlib, "import_module", lambda name: cupy)
    monkeypatch.setattr(Event, "made", 0)
    gpu = cuda.Gpu(3)
    cupy.said.clear()
    return gpu, cupy


OURS = "ours, non_blocking=True"


def test_our_stream_waits_for_an_event_on_the_callers(gpu_and_cupy):
    gpu, cupy = gpu_and_cupy
    gpu.follow_caller()
    assert cupy.said == ["enter device 3", "1 on caller", f"{OURS} waits for 1", "leave device 3"]


def test_the_context_is_our_device_and_then_our_stream(gpu_and_cupy):
    gpu, cupy = gpu_and_cupy
    with gpu:
        gpu.mark()
    assert cupy.said == ["enter device 3", f"enter {OURS}", f"0 on {OURS}", f"leave {OURS}", "leave device 3"]


@pytest.mark.parametrize(("status", "done"), [(0, True), (600, False)])
def test_an_event_is_asked_for_and_never_waited_for(gpu_and_cupy, status, done):
    gpu, cupy = gpu_and_cupy
    cupy.status = status
    assert gpu.done() is done


def test_a_failed_kernel_is_an_error_and_no_endless_wait(gpu_and_cupy):
    gpu, cupy = gpu_and_cupy
    cupy.status = 700
    with pytest.raises(NcclFailed, match="CUDA error 700 on GPU 3 in a collective operation"):
        gpu.done()


@pytest.mark.parametrize("dtype", ["f4", "f2", "i8"])
def test_pinned_arrays_are_aligned_and_known_again(gpu_and_cupy, dtype):
    gpu, _ = gpu_and_cupy
    array = gpu.pinned(1001, dtype)
    assert (array.shape, array.dtype, array.ctypes.data % 64) == ((1001,), np.dtype(dtype), 0)
    assert gpu.is_pinned(array)
    assert gpu.is_pinned(array[5:])
    assert not gpu.is_pinned(np.empty(1001, dtype))


def test_copies_go_on_our_stream(gpu_and_cupy):
    gpu, cupy = gpu_and_cupy
    host, array = gpu.pinned(10, "f4"), cupy.ndarray(3, cupy.said)
    cupy.said.clear()
    gpu.upload(host, array)
    gpu.download(array, host)
    assert cupy.said == [("up", host.ctypes.data, 40, OURS), ("down", host.ctypes.data, 40, OURS)]


def test_memory_is_adopted_where_it_lies(gpu_and_cupy):
    gpu, cupy = gpu_and_cupy
    ours = cupy.ndarray(3, [])
    assert gpu.adopt(ours) is ours
    assert isinstance(gpu.adopt(Tensor(cuda.CUDA)), cupy.ndarray)
    assert cupy.said == ["from_dlpack"]
    assert gpu.adopt(Tensor(cuda.CPU)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "make", [lambda cupy: cupy.ndarray(1, []), lambda _: Tensor(cuda.CUDA, 0), lambda _: Tensor(10)]
)
def test_memory_of_another_device_is_refused(gpu_and_cupy, make):
    gpu, cupy = gpu_and_cupy
    with pytest.raises(ValueError, match="array must lie on GPU 3, as the group does, or on the host"):
        gpu.adopt(make(cupy))


def test_a_producer_that_refuses_is_quoted(gpu_and_cupy):
    gpu, _ = gpu_and_cupy

    class Refuses(Tensor):
        def __dlpack__(self, **options):
            raise BufferError("call detach() first")

    with pytest.raises(TypeError, match=r"or a DLPack producer \(got Refuses: call detach\(\) first\)"):
        gpu.adopt(Refuses(cuda.CPU))


def test_two_ranks_on_one_gpu_say_the_same_name(gpu_and_cupy):
    gpu, _ = gpu_and_cupy
    assert gpu.identity == cuda.Gpu(3).identity
    assert gpu.identity != cuda.Gpu(2).identity
