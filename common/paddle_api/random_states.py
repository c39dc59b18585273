"""The state of this process's random generators, Python's, NumPy's and Paddle's, as plain values and arrays.

Paddle 3 shows a generator's state only as text: device, seed, offset, the address of its std::mt19937_64, and that
engine's 312 words and index. The engine lies in memory in the same form (libstdc++), which is where it is set.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import paddle

from common.errors import UsageError

__all__ = ["RandomStates", "random_arrays", "set_random"]

ENGINE = 313  # words of a std::mt19937_64: its state and its index
PYTHON, NUMPY, PADDLE = "python", "numpy", "paddle"


def random_arrays() -> dict[str, npt.NDArray[Any]]:
    """The states by the generators' names, 1-D."""
    return RandomStates().arrays()


class RandomStates:
    """For who asks again and again: what has not changed since the last call is not made anew, which takes 200 us."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """As `random_arrays`; not to be changed."""
        python, numpys = random.getstate(), np.random.get_state()
        _, keys, *rest = cast(tuple[Any, ...], numpys)
        state = paddle.base.core.default_cpu_generator().get_state()
        paddles = str(state)
        if self._is_new(PYTHON, python):
            version, words, gauss = python
            self._arrays[PYTHON] = np.array([version, *words, np.nan if gauss is None else gauss], np.float64)
        if self._is_new(NUMPY, (keys.tobytes(), rest)):
            self._arrays[NUMPY] = np.array([*keys, *rest], np.float64)  # all below 2^53, or a float64
        _, seed, offset, _, engine = paddles.split(maxsplit=4)  # the address is each time another one's
        if self._is_new(PADDLE, (seed, offset, engine)):
            self._arrays[PADDLE] = _words_of(state, paddles)
        return dict(self._arrays)

    def _is_new(self, name: str, state: Any) -> bool:
        new = name not in self._seen or self._seen[name] != state
        self._seen[name] = state
        return bool(new)


def set_random(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Have the generators go on from what `random_arrays` gave, those that are in it.

    Raises:
        UsageError: this Paddle's generator cannot be set.
    """
    if PYTHON in arrays:
        version, *words, gauss = arrays[PYTHON].tolist()
        random.setstate((int(version), tuple(map(int, words)), None if np.isnan(gauss) else gauss))
    if NUMPY in arrays:
        *keys, position, has_gauss, left = arrays[NUMPY].tolist()
        np.random.set_state(("MT19937", np.array(keys, np.uint32), int(position), int(has_gauss), left))
    if PADDLE in arrays:
        _set_paddles(arrays[PADDLE])


def _words_of(state: Any, text: str) -> npt.NDArray[np.uint64]:
    """Seed, offset, and the engine's words, of a state of Paddle's and the same as text."""
    _, seed, offset, _, *engine = text.split()
    _engine_of(state)  # could it be set?
    return np.array([int(seed), int(offset), *map(int, engine)], np.uint64)


def _set_paddles(values: npt.NDArray[np.uint64]) -> None:
    generator = paddle.base.core.default_cpu_generator()
    generator.manual_seed(int(values[0]))
    state = generator.get_state()
    _engine_of(state)[:] = values[2:]
    generator.set_state(state)


def _engine_of(state: Any) -> npt.NDArray[np.uint64]:
    """The engine's words where they lie.

    Raises:
        UsageError: there is something else.
    """
    _, _, _, address, *engine = str(state).split()
    words = np.ctypeslib.as_array((ctypes.c_uint64 * ENGINE).from_address(int(address, 16)))
    if words.tolist() != list(map(int, engine)):
        raise UsageError(f"the state of the random generator of Paddle {paddle.__version__} cannot be kept")
    return words
