"""Paddle's own optimizers on flat buffers: one update for a whole run of parameters.

A flat buffer of a multiple of 16 elements, as arenas are, gives the same bits however it is cut at such multiples. They
are also those of Paddle's per-parameter updates for Momentum, Adam and AdamW. Adagrad and RMSProp differ by rounding in
a parameter's last few elements, where Paddle's kernels leave the vector loop; SGD, on a CPU with AVX-512, in parameters
of a size that is no multiple of 8, for which Paddle has another kernel. PartOptimizer has none of these differences.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle.base.framework import EagerParamBase

from common.errors import UsageError
from common.tensors.arena import FloatArray
from common.tensors.optimizers import OPTIMIZERS, Optimizer
from common.tensors.parts import Accumulator, Part, Piece, is_number, slot_of_key

__all__ = ["FlatOptimizer", "PartOptimizer", "PieceOptimizer", "as_tensor", "initial_state"]

CLASSES = {
    name: getattr(paddle.optimizer, kind.__name__) for name, kind in OPTIMIZERS.items()
}  # "adam" -> paddle.optimizer.Adam


def as_tensor(array: FloatArray) -> Any:
    """A Paddle CPU tensor that shares `array`'s memory (which the caller keeps alive); Paddle 2.6 and 3.x."""
    return paddle.base.core.eager.Tensor(value=array, place=paddle.CPUPlace(), zero_copy=True)


class FlatOptimizer:
    """Updates `parameters` in place from `gradients`; both 1-D float32 of equal length, kept by reference."""

    def __init__(self, description: Optimizer, parameters: FloatArray, gradients: FloatArray) -> None:
        if parameters.shape != gradients.shape:
            raise ValueError(
                f"parameters and gradients must be of equal shape (got {parameters.shape}, {gradients.shape})"
            )
        self._keep_alive = (parameters, gradients)
        self._named = False
        self._empty = parameters.size == 0  # a server may own nothing
        if self._empty:
            return
        with fresh_names():
            self._parameter = parameter_on(parameters, "flat")
            self._parameter._copy_gradient_from(as_tensor(gradients))  # attaches, despite its name
            self._paddle = make_paddle_optimizer(description, [self._parameter])

    def step(self, learning_rate: float, used: bytes = b"") -> None:  # noqa: ARG002 - it updates all alike
        """One update at this learning rate."""
        if self._empty:
            return
        self._paddle.set_lr(learning_rate)
        with nullcontext() if self._named else fresh_names(), fitting_state():  # the first step names the moments
            self._paddle.step()
        self._named = True

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """As of FlatUpdater."""
        return {} if self._empty else arrays_of(self._paddle, self._parameter.name)

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """As of FlatUpdater.

        Raises:
            UsageError (`step`): the state is not this optimizer's.
        """
        if not self._empty and arrays:
            load_into(self._paddle, {self._parameter.name: arrays})

    def state_elements(self) -> int:
        """How many numbers the optimizer keeps beside the parameters (moments and the like)."""
        if self._empty:
            return 0
        return sum(int(np.prod(t.shape)) for t in self._paddle.state_dict().values() if hasattr(t, "shape"))


class PieceOptimizer:
    """Updates pieces of `parameters` (1-D float32, kept by reference) in place, each a Paddle parameter by itself.

    Of `paddle.optimizer.Optimizer.step` it calls what makes the update; the rest, which finds out which parameters have
    gradients, takes ten times as long, as long as updating 400 KB.
    """

    def __init__(self, description: Optimizer, parameters: FloatArray, pieces: Sequence[Piece]) -> None:
        self._keep_alive = parameters
        self._parameters = {p.start: parameter_on(parameters[p.start : p.stop], f"piece{p.start}") for p in pieces}
        self._gradients: dict[tuple[int, int], Any] = {}  # tensors, by address and size
        self._rate: float | None = None
        if pieces:
            self._block = paddle.static.default_main_program().global_block()
            with fresh_names():
                self._paddle = make_paddle_optimizer(description, list(self._parameters.values()))
                self._paddle._create_global_learning_rate()
                self._paddle._create_accumulators(self._block, list(self._parameters.values()))
            for parameter in self._parameters.values():
                parameter.stop_gradient = True  # Paddle updates none in place that a backward may need

    def set_rate(self, learning_rate: float) -> None:
        """The learning rate of what follows."""
        if self._parameters and learning_rate != self._rate:
            self._paddle.set_lr(learning_rate)
            self._rate = learning_rate

    def step(self, start: int, gradients: FloatArray) -> None:
        """Update the piece that begins at word `start`. Several threads may update pieces at the same time."""
        mine = [(self._parameters[start], self._tensor(gradients))]
        for pair in self._paddle.append_regularization_ops(mine, self._paddle.regularization):
            self._paddle._append_optimize_op(self._block, pair)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """As of PieceUpdater."""
        names = [parameter.name for _, parameter in sorted(self._parameters.items())]
        pieces = [arrays_of(self._paddle, name) for name in names]
        return {
            kind: pieces[0][kind] if is_number(kind) else np.concatenate([piece[kind] for piece in pieces])
            for kind in (pieces[0] if pieces else ())
        }

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """As of PieceUpdater.

        Raises:
            UsageError: the state is not this optimizer's.
        """
        cut = {
            parameter.name: {
                kind: array if is_number(kind) else array[start : start + parameter.size]
                for kind, array in arrays.items()
            }
            for start, parameter in self._parameters.items()
        }
        if cut and arrays:
            load_into(self._paddle, cut)
            self._paddle._accumulators_holder = {}

    def _tensor(self, gradients: FloatArray) -> Any:
        """Making one takes as long as all else here, and gradients always come in the same few arrays."""
        key = gradients.__array_interface__["data"][0], gradients.size
        if key not in self._gradients:
            self._gradients[key] = as_tensor(gradients)
        return self._gradients[key]


class PartOptimizer:
    """Updates the parts of parameters that lie in a slice of the arena, each as Paddle updates a parameter: bitwise
    equal to the user's own optimizer, and parameters that no rank has used stay as they are.

    Args:
        parameters, gradients: the slice, 1-D float32 words; kept by reference. Where it ends within a parameter, zeros
            must follow it, as many as `PADDING`.
    """

    def __init__(
        self, description: Optimizer, parameters: FloatArray, gradients: FloatArray, parts: Sequence[Part]
    ) -> None:
        self._parts = list(parts)
        self._names = [part.name for part in parts]
        self._values = [parameters[part.start : part.padded_stop].view(part.dtype) for part in parts]
        self._gradients = [as_tensor(gradients[part.start : part.padded_stop].view(part.dtype)) for part in parts]
        self._keep_alive = (parameters, gradients)
        self._parameters = [parameter_on(v, part.name) for v, part in zip(self._values, parts, strict=True)]
        self._attached = [False] * len(parts)
        if parts:
            with fresh_names():
                self._paddle = make_paddle_optimizer(description, self._parameters)

    def step(self, learning_rate: float, used: bytes = b"") -> None:
        """One update of what is used, at this learning rate.

        Raises:
            UsageError: it needs something that the state loaded before does not have.
        """
        if not self._parts:
            return
        for index, (part, parameter) in enumerate(zip(self._parts, self._parameters, strict=True)):
            wanted = bool(used[part.slot]) if used else True
            if wanted and not self._attached[index]:
                view = self._gradients[index]._slice(0, self._values[index].size)
                parameter._copy_gradient_from(view)  # attaches, despite its name
            elif self._attached[index] and not wanted:
                parameter.clear_gradient(False)
            self._attached[index] = wanted
        self._paddle.set_lr(learning_rate)
        with fitting_state(), fresh_names():  # the first step names the moments
            self._paddle.step()

    def state(self) -> list[Accumulator]:
        """What Paddle's optimizer keeps beside the parameters, as copies."""
        found = []
        for key, tensor in (self._paddle.state_dict() if self._parts else {}).items():
            index = slot_of_key(key, self._names)
            if index is not None:
                part, values = self._parts[index], np.array(tensor.numpy()).reshape(-1)
                if is_number(key):
                    found.append(Accumulator(key, part.slot, values.size, 0, values))
                else:
                    found.append(Accumulator(key, part.slot, part.size, part.first, values[: part.count]))
        return found

    def load(self, state: Sequence[Accumulator]) -> None:
        """Go on from a state as `state` gave it.

        Raises:
            UsageError: something is missing in it.
        """
        if not self._parts:
            return
        tensors = {}
        for each in state:
            index = slot_of_key(each.key, self._names)
            if index is not None:
                missing = 0 if is_number(each.key) else self._values[index].size - each.values.size
                tensors[each.key] = paddle.to_tensor(np.pad(each.values, (0, missing)))
        with fitting_state(), fresh_names():
            self._paddle.set_state_dict(tensors)


def initial_state(description: Optimizer, parameter: Any) -> dict[str, npt.NDArray[Any]]:
    """What Paddle's optimizer keeps of a parameter before its first update, by the keys of its state."""
    with fresh_names():
        like = parameter_on(np.zeros(parameter.size, str(parameter.dtype).rpartition(".")[2]), parameter.name)
        optimizer = make_paddle_optimizer(description, [like])
        optimizer._create_accumulators(paddle.static.default_main_program().global_block(), [like])
    return {key: value.numpy() for key, value in optimizer.state_dict().items() if hasattr(value, "numpy")}


def arrays_of(optimizer: Any, name: str) -> dict[str, npt.NDArray[Any]]:
    """Copies of what Paddle's optimizer keeps of the parameter of that name, 1-D, by kind: "moment1_0"."""
    begin = name + "_"
    return {
        key[len(begin) :]: np.array(tensor.numpy()).reshape(-1)
        for key, tensor in optimizer.state_dict().items()
        if key.startswith(begin)
    }


def load_into(optimizer: Any, arrays: Mapping[str, Mapping[str, npt.NDArray[Any]]]) -> None:
    """Have Paddle's optimizer go on from what `arrays_of` gave, by the parameters' names."""
    tensors = {
        f"{name}_{kind}": paddle.to_tensor(array) for name, kinds in arrays.items() for kind, array in kinds.items()
    }
    with fitting_state(), fresh_names():
        optimizer.set_state_dict(tensors)


_naming = threading.RLock()


@contextmanager
def fresh_names() -> Iterator[None]:
    """Names of accumulators end in 0, whatever was made before. Paddle counts for the whole process, in which several
    servers may live."""
    with _naming, paddle.utils.unique_name.guard():
        yield


@contextmanager
def fitting_state() -> Iterator[None]:
    """Paddle asserts that a state has what the optimizer needs: at once, or where that is not known yet at a step."""
    try:
        yield
    except AssertionError as exc:
        raise UsageError(f"the optimizer state does not fit the optimizer: {exc}") from exc


def make_paddle_optimizer(description: Optimizer, parameters: Sequence[Any]) -> Any:
    settings = asdict(description)
    if not settings["weight_decay"] and description.name != "adamw":
        del settings["weight_decay"]  # Paddle would spend a pass on adding zero times the parameters
    return CLASSES[description.name](parameters=list(parameters), **settings)


def parameter_on(values: Any, name: str) -> Any:
    """A Paddle parameter of that name over a 1-D array, whose memory it shares."""
    parameter = EagerParamBase(shape=[values.size], dtype=values.dtype.name, name=name)
    as_tensor(values)._share_buffer_to(parameter)
    return parameter
