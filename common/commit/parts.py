"""One participant's part of a commit: its arrays and plain values, as the bytes of a safetensors file.

Or, for a copy in memory after each step, as buffers that nothing has copied yet: the length of a header in JSON, the
header, the arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors import numpy as safetensors

__all__ = ["Buffer", "Part", "from_buffers", "from_bytes", "to_buffers", "to_bytes"]

Array = npt.NDArray[Any]
Buffer = bytes | memoryview
LENGTH_BYTES = 8
STATE = "state"  # the entry of the file's header that holds the plain values


@dataclass(frozen=True)
class Part:
    """
    Args:
        arrays: by names, of which those with a common beginning belong together: `parameters.`, `optimizer.`.
        state: plain values as JSON has them, keys are texts.
    """

    arrays: Mapping[str, Array] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    def beginning(self, prefix: str) -> dict[str, Array]:
        """The arrays whose names begin so, by the rest of their names."""
        return {name[len(prefix) :]: array for name, array in self.arrays.items() if name.startswith(prefix)}


def to_bytes(part: Part) -> bytes:
    """The file's content."""
    arrays = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in part.arrays.items()}
    return safetensors.save(arrays, metadata={STATE: json.dumps(part.state)})


def from_bytes(content: bytes) -> Part:
    """What `to_bytes` made into this.

    Raises:
        ValueError: nothing that it makes.
    """
    try:
        arrays = safetensors.load(content)
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        return Part(arrays, json.loads(header["__metadata__"][STATE]))
    except (SafetensorError, KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"not a part of a commit ({exc})") from exc


def to_buffers(part: Part) -> Sequence[Buffer]:
    """Whose bytes, one after the other, are the part; the arrays must not change until these are written."""
    arrays = {name: np.ascontiguousarray(array) for name, array in part.arrays.items()}
    places = {name: (array.dtype.str, part.arrays[name].shape) for name, array in arrays.items()}
    header = json.dumps([places, part.state]).encode()
    values = [array.reshape(-1).view(np.uint8).data for array in arrays.values() if array.size]
    return [len(header).to_bytes(LENGTH_BYTES, "little"), header, *values]


def from_buffers(content: bytes) -> Part:
    """What `to_buffers` made into this, joined."""
    where = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    places, state = json.loads(content[LENGTH_BYTES:where])
    arrays = {}
    for name, (dtype, shape) in places.items():
        count = math.prod(shape)
        arrays[name] = np.frombuffer(content, dtype, count, where if count else 0).reshape(shape).copy()
        where += arrays[name].nbytes
    return Part(arrays, state)
