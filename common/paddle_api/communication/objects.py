"""Python's objects as bytes and back, without pickle: plain types, containers, NumPy's arrays and Paddle's tensors.

    length of the JSON text, 8 bytes | JSON text | blobs, one after the other

In the text None, bool, int (of 64 bits), float (finite) and str are themselves; everything else is a list that begins
with a letter, and a blob is its length:

    ["l", ...] list      ["t", ...] tuple       ["s", ...] set        ["f", ...] frozenset
    ["d", key, value, key, value, ...] dict     ["D", ...] OrderedDict     ["C", ...] Counter
    ["m", what makes missing values, key, value, ...] defaultdict          ["q", most or null, ...] deque
    ["R", start, stop, step] range              ["x", kind, text] what is made of a text: PLAIN
    ["i", hex] int       ["r", "nan"] float     ["c", real, imaginary] complex
    ["b", blob] bytes    ["B", blob] bytearray
    ["a", dtype, shape, blob] array             ["n", dtype, blob] NumPy's scalar
    ["p", dtype, shape, blob, stop_gradient] Paddle's tensor
    ["o", blob] any other object, pickled: only where that was asked for

What is read is checked before anything is made of it, and nothing is made larger than the bytes that are there.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath
from typing import Any

import numpy as np
import paddle

from common.errors import ProtocolError, UsageError
from common.paddle_api.communication.tensors import DTYPES, array_of

__all__ = ["MOST_DEPTH", "Codec"]

LENGTH = struct.Struct("<Q")
MOST_DEPTH = 100  # of containers in containers
DTYPE = re.compile(r"[<>|][biufcSU]\d{1,9}|[<>][Mm]8(\[\d{0,9}\w{1,2}\])?")
MOST_DIMENSIONS = 32
MOST_EMPTY = 1 << 20  # elements that an array without bytes may seem to have
TENSORS = {str(dtype): (dtype, stored) for dtype, stored in DTYPES.items()}
CONTAINERS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
PAIRS: dict[type, str] = {dict: "d", OrderedDict: "D", Counter: "C"}
FACTORIES: dict[str, Any] = {each.__name__: each for each in (int, float, str, list, dict, set, tuple, Counter)}
PLAIN: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    Decimal: (str, Decimal),
    PosixPath: (str, PosixPath),
    PurePosixPath: (str, PurePosixPath),
    timedelta: (lambda d: f"{d.days} {d.seconds} {d.microseconds}", lambda text: timedelta(*map(int, text.split()))),
    **{kind: (kind.isoformat, kind.fromisoformat) for kind in (datetime, date, time)},
}
PLAIN_NAMES = {kind.__name__: kind for kind in PLAIN}
MADE: dict[str, Callable[[Any], Any]] = {letter: kind for kind, letter in CONTAINERS.items()}
OF_PAIRS: dict[str, Callable[[Any], Any]] = {letter: kind for kind, letter in PAIRS.items()}


class Codec:
    """
    Args:
        pickles: other objects are pickled, and unpickled, which runs what the sender likes.
    """

    def __init__(self, *, pickles: bool = False) -> None:
        self._pickles = pickles

    def encode(self, value: Any) -> bytes:
        """
        Raises:
            UsageError: it holds an object of another type, which is named, or itself.
        """
        writer = Writer(self._pickles)
        text = json.dumps(writer.tree(value, 0), separators=(",", ":")).encode()
        return b"".join([LENGTH.pack(len(text)), text, *writer.blobs])

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """
        Raises:
            ProtocolError: these bytes are not what `encode` gives.
        """
        view = memoryview(data).cast("B")
        try:
            (length,) = LENGTH.unpack_from(view)
            end = LENGTH.size + length
            if end > len(view):
                raise ProtocolError(f"an object's text has {len(view) - LENGTH.size} bytes, expected {length}")
            reader = Reader(view[end:], self._pickles)
            value = reader.value(json.loads(bytes(view[LENGTH.size : end])), 0)
        except ProtocolError:
            raise
        except (ValueError, TypeError, KeyError, ArithmeticError, struct.error, RecursionError) as exc:
            raise ProtocolError(f"an object cannot be read: {type(exc).__name__}: {exc}") from exc
        if reader.left:
            raise ProtocolError(f"{reader.left} bytes follow an object")
        return value


class Writer:
    """Makes the tree of one object, and collects its blobs."""

    def __init__(self, pickles: bool) -> None:
        self._pickles = pickles
        self.blobs: list[bytes] = []

    def tree(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else ["i", hex(value)]
        if kind is float:
            return value if math.isfinite(value) else ["r", str(value)]
        if kind is complex:
            return ["c", self.tree(value.real, depth), self.tree(value.imag, depth)]
        if kind is bytes or kind is bytearray:
            return ["b" if kind is bytes else "B", self._blob(bytes(value))]
        if depth == MOST_DEPTH:
            raise UsageError(f"an object holds more than {MOST_DEPTH} containers in one another, or itself")
        if kind in CONTAINERS:
            return [CONTAINERS[kind], *(self.tree(each, depth + 1) for each in value)]
        if kind in PAIRS:
            return [PAIRS[kind], *self._pairs(value, depth)]
        return self._of_library(value, depth) or self._of_numbers(value) or self._pickled(value)

    def _pairs(self, value: Any, depth: int) -> list[Any]:
        return [self.tree(x, depth + 1) for pair in value.items() for x in pair]

    def _of_library(self, value: Any, depth: int) -> list[Any] | None:
        kind = type(value)
        if kind is defaultdict and (value.default_factory is None or value.default_factory in FACTORIES.values()):
            return ["m", value.default_factory and value.default_factory.__name__, *self._pairs(value, depth)]
        if kind is deque:
            return ["q", value.maxlen, *(self.tree(each, depth + 1) for each in value)]
        if kind is range:
            return ["R", *(self.tree(number, depth) for number in (value.start, value.stop, value.step))]
        if kind in PLAIN and getattr(value, "tzinfo", None) is None:
            return ["x", kind.__name__, PLAIN[kind][0](value)]
        return None

    def _of_numbers(self, value: Any) -> list[Any] | None:
        if type(value) is np.ndarray and DTYPE.fullmatch(value.dtype.str) and value.ndim <= MOST_DIMENSIONS:
            return ["a", value.dtype.str, list(value.shape), self._blob(value.tobytes())]
        if isinstance(value, np.generic) and DTYPE.fullmatch((array := np.asarray(value)).dtype.str):
            return ["n", array.dtype.str, self._blob(array.tobytes())]
        if isinstance(value, paddle.Tensor) and value.dtype in DTYPES:
            blob = self._blob(array_of(value).tobytes())
            return ["p", str(value.dtype), list(value.shape), blob, value.stop_gradient]
        return None

    def _pickled(self, value: Any) -> list[Any]:
        if not self._pickles:
            raise UsageError(
                f"an object of type {type(value).__module__}.{type(value).__qualname__} cannot be sent: plain types, "
                "containers, arrays and tensors can; with --allow-pickle (GRADSYNC_ALLOW_PICKLE=1) others can, too, "
                "among the processes of one host"
            )
        return ["o", self._blob(pickle.dumps(value))]

    def _blob(self, data: bytes) -> int:
        self.blobs.append(data)
        return len(data)


class Reader:
    """Makes an object of its tree and its blobs; raises ValueError, TypeError or ProtocolError where it cannot."""

    def __init__(self, blobs: memoryview, pickles: bool) -> None:
        self._blobs, self._pickles, self._at = blobs, pickles, 0

    @property
    def left(self) -> int:
        """Bytes of blobs that were not read."""
        return len(self._blobs) - self._at

    def value(self, tree: Any, depth: int) -> Any:
        if not isinstance(tree, list):
            if isinstance(tree, dict):
                raise ProtocolError("an object's text has braces")
            return tree
        if depth > MOST_DEPTH:
            raise ProtocolError(f"an object holds more than {MOST_DEPTH} containers in one another")
        letter, *rest = tree
        if letter in MADE:
            return MADE[letter](self.value(each, depth + 1) for each in rest)
        if letter in OF_PAIRS:
            return OF_PAIRS[letter](dict(self._pairs(rest, depth)))
        match letter, rest:
            case "m", [None | str() as factory, *pairs]:
                return defaultdict(FACTORIES[factory] if factory else None, self._pairs(pairs, depth))
            case "q", [None | int() as most, *items]:
                return deque((self.value(each, depth + 1) for each in items), most)
            case "R", [_, _, _]:
                return range(*(self.value(each, depth + 1) for each in rest))
        return self._leaf(letter, rest)

    def _pairs(self, trees: list[Any], depth: int) -> list[tuple[Any, Any]]:
        flat = [self.value(each, depth + 1) for each in trees]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def _leaf(self, letter: str, rest: list[Any]) -> Any:
        match letter, rest:
            case "i", [str(digits)]:
                return int(digits, 16)
            case "x", [str(kind), str(text)] if kind in PLAIN_NAMES:
                return PLAIN[PLAIN_NAMES[kind]][1](text)
            case "r", [("nan" | "inf" | "-inf") as which]:
                return float(which)
            case "c", [real, imaginary]:
                return complex(self._float(real), self._float(imaginary))
            case "b", [size]:
                return bytes(self._blob(size))
            case "B", [size]:
                return bytearray(self._blob(size))
            case "a", [str(dtype), list(shape), size]:
                return self._array(self._dtype(dtype), shape, size)
            case "n", [str(dtype), size]:
                return self._array(self._dtype(dtype), [], size)[()]
            case "p", [str(dtype), list(shape), size, bool(stop)] if dtype in TENSORS:
                return self._tensor(dtype, shape, size, stop)
            case "o", [size]:
                return self._unpickled(size)
        raise ProtocolError(f"an object's text has something unknown: {str(letter)[:20]!r}")

    def _float(self, tree: Any) -> float:
        if isinstance(tree, float):
            return tree
        if isinstance(tree, list) and tree[:1] == ["r"]:
            return float(self._leaf("r", tree[1:]))
        raise ProtocolError("an object's text has a complex number of something else than floats")

    def _blob(self, size: Any) -> memoryview:
        if type(size) is not int or not 0 <= size <= self.left:
            raise ProtocolError(f"an object's blob of {size} bytes is not there")
        self._at += size
        return self._blobs[self._at - size : self._at]

    def _dtype(self, name: str) -> np.dtype[Any]:
        if not DTYPE.fullmatch(name):
            raise ProtocolError(f"an object has an array of type {name[:20]!r}")
        return np.dtype(name)

    def _array(self, dtype: np.dtype[Any], shape: list[Any], size: Any) -> np.ndarray[Any, Any]:
        if len(shape) > MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
            raise ProtocolError(f"an object has an array of shape {str(shape)[:80]}")
        blob = self._blob(size)
        if math.prod(shape) * dtype.itemsize != len(blob):
            raise ProtocolError(f"an object's array has {len(blob)} bytes, its shape and type say otherwise")
        if not len(blob):
            if math.prod(n or 1 for n in shape) > MOST_EMPTY:
                raise ProtocolError(f"an object has an empty array of shape {str(shape)[:80]}")
            return np.zeros(shape, dtype)  # of a dtype without bytes, S0 or U0, NumPy makes one with some
        return np.frombuffer(bytearray(blob), dtype).reshape(shape)

    def _tensor(self, name: str, shape: list[Any], size: Any, stop_gradient: bool) -> Any:
        dtype, stored = TENSORS[name]
        array = self._array(stored, shape, size)
        tensor = paddle.empty(shape, dtype)
        tensor.set_value(array)
        tensor.stop_gradient = stop_gradient
        return tensor

    def _unpickled(self, size: Any) -> Any:
        blob = self._blob(size)
        if not self._pickles:
            raise ProtocolError("another rank sent a pickled object, and this one was started without --allow-pickle")
        try:
            return pickle.loads(blob)
        except Exception as exc:  # whatever the object's own code raises
            raise ProtocolError(f"a pickled object cannot be read: {type(exc).__name__}: {exc}") from exc
