"""Parsers of what programs send each other by Paddle's calls, of traces, and of files."""

from __future__ import annotations

import gzip
import json
import tempfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from benchmarks.records.result_files import plain, read
from common.launch.trace_file import to_chrome
from common.launch.tracing import unpacked
from common.paddle_api.communication.objects import Codec
from common.paddle_api.communication.post import Post
from common.sync.messenger import Messenger
from common.sync.trace import Recorder
from common.trainer.data import load_mnist_json, read_idx
from tests.fuzz.target import Target
from tests.support.report_samples import every_sample

__all__ = ["TARGETS"]

VALUES: list[Any] = [
    *(None, True, 5, 1 << 70, 0.5, float("nan"), "text", b"bytes", bytearray(b"x"), 1j),
    {"a": [1, (2, {3}), frozenset([4])], "b": OrderedDict(c=np.arange(6).reshape(2, 3))},
    [Counter("aab"), defaultdict(list, {1: [2]}), deque([1, 2], 3), range(2, 9, 3), Decimal("1.5"), date(2026, 1, 2)],
    [np.float32(2), np.array(["x", "yy"]), np.empty((0, 3)), paddle.to_tensor([1.0, 2.0])],
]


class OneMessage(Messenger):
    """Brings the same again and again."""

    rank, nranks = 0, 2

    def __init__(self, data: bytes) -> None:
        self._data = data

    def send(self, to: int, channel: int, data: Any) -> None:
        raise AssertionError

    def receive(self, source: int, channel: int) -> bytearray:
        return bytearray(self._data)

    def comes(self, source: int, channel: int, seconds: float) -> bool:
        return True


class Sent(OneMessage):
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent = b""

    def send(self, to: int, channel: int, data: Any) -> None:
        self.sent += bytes(data)


def posted(array: Any, call: str = "send") -> bytes:
    sent = Sent()
    Post(sent, [0, 1], 7).send(1, call, array)
    return sent.sent


def take_post(data: bytes) -> None:
    post = Post(OneMessage(data), [0, 1], 7)
    if len(data) % 2:
        post.receive(1, "send", np.dtype(np.float32), [2, 3])
    else:
        post.receive(1, "send", np.dtype(np.float32), None)


def recorded(kind: str = "rank") -> bytes:
    recorder = Recorder(kind, 0, scheme="ring", mode="sync", nranks=1, servers=0, staleness=0)
    for name in ("input", "forward", "finish"):
        with recorder.span(name):
            recorder.moment("ready", 0)
    return recorder.packed()


def take_part(data: bytes) -> None:
    """Packed, or, after a zero, what would be."""
    part = unpacked(zlib.compress(data[1:]) if data[:1] == b"\0" else data)
    if part["kind"] == "rank" and part["index"] == 0:
        to_chrome([part])


def in_file(read: Callable[[Path], object], *, packed: bool) -> Callable[[bytes], object]:
    """The reader of a file as one of bytes: packed, or, after a zero, what is packed."""

    def parse(data: bytes) -> None:
        data = gzip.compress(data[1:], 1) if packed and data[:1] == b"\0" else data
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.write(data)
            file.flush()
            read(Path(file.name))

    return parse


def both(data: bytes) -> list[bytes]:
    return [b"\0" + data, gzip.compress(data, 1)]


IMAGES = b"\0\0\x08\3" + b"".join(n.to_bytes(4, "big") for n in (1, 4, 4)) + bytes(16)
LABELS = b"\0\0\x08\1" + (3).to_bytes(4, "big") + bytes(3)
DIGIT = [[[0.5] * 784], [7]]
MNIST = json.dumps([DIGIT, DIGIT, DIGIT]).encode()
PART = zlib.decompress(recorded())
RESULTS = sorted({json.dumps(plain(sample)).encode() for _, sample in every_sample()}, key=len)[:6]
HEADERS = [posted(np.ones((2, 3), np.float32)), posted(np.ones(6, np.float32)), posted(np.ones((0, 3), np.float32))]
TARGETS = [
    Target("objects", Codec().decode, [Codec().encode(value) for value in VALUES]),
    Target("post", take_post, HEADERS),
    Target("traces", take_part, [recorded(), recorded("server"), b"\0" + PART]),
    Target("idx-images", in_file(lambda path: read_idx(path, dimensions=3), packed=True), both(IMAGES)),
    Target("idx-labels", in_file(lambda path: read_idx(path, dimensions=1), packed=True), both(LABELS)),
    Target("mnist-json", in_file(load_mnist_json, packed=True), both(MNIST)),
    Target("results", in_file(read, packed=False), RESULTS),
]
