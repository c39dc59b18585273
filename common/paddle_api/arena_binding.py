"""A Paddle model's parameters and gradients as views of an arena, and what a backward has reached of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import numpy as np
import paddle

from common.errors import UsageError
from common.tensors.arena import Arena, FloatArray, Layout, Slot, sha256_of_parameters
from common.tensors.flat_optimizer import as_tensor

__all__ = ["Binding", "Named", "digest_of_model", "layout_of", "trainable"]

Named = Sequence[tuple[str, Any]]  # parameters, by their names in the state_dict


def trainable(model: Any) -> list[tuple[str, Any]]:
    """(name, parameter) of all that is trained, in state_dict order; BatchNorm statistics are not."""
    wanted = {id(p) for p in model.parameters() if not p.stop_gradient}
    found: dict[int, tuple[str, Any]] = {}
    for name, p in model.state_dict().items():
        if id(p) in wanted:
            found.setdefault(id(p), (name, p))  # tied parameters have several names
    return list(found.values())


def layout_of(model: Any) -> Layout:
    """The layout of a model's trainable parameters.

    Raises:
        UsageError: it has none, or one that is not float32.
    """
    named = trainable(model)
    if not named:
        raise UsageError("the model has no trainable parameter")
    for name, p in named:
        if p.dtype != paddle.float32:
            raise UsageError(f"parameter {name} is {p.dtype}; only float32 is supported so far")
    return Layout.of((name, p.shape) for name, p in named)


def digest_of_model(model: Any) -> str:
    """SHA-256 of the trainable parameters, the `parameters_sha256` of a run record."""
    return sha256_of_parameters((name, p.numpy()) for name, p in trainable(model))


def nothing_again(index: int) -> None:
    """For models of which a backward reaches every parameter once."""


class Binding:
    """Binds parameters to an arena's slots of the same names: forward then reads `arena.parameters`, backward
    accumulates into `arena.gradients`, and nothing is ever packed.

    Args:
        on_complete: called with a bucket's number, from the thread that runs backward, when the gradients of all its
            parameters are there. What it raises is kept and raised by `raise_error`.
        on_again: called likewise with a parameter's number when a backward reaches it once more.
    """

    def __init__(
        self,
        named: Named,
        arena: Arena,
        on_complete: Callable[[int], None],
        on_again: Callable[[int], None] = nothing_again,
    ) -> None:
        self.named, self.arena = named, arena
        by_name = {slot.name: slot for slot in arena.layout.slots}
        self.slots = [by_name[name] for name, _ in named]
        self.reached: set[int] = set()  # parameters to which this backward has given a gradient
        self._on_complete, self._on_again = on_complete, on_again
        self._gradient_addresses = [arena.gradients[slot.start :].ctypes.data for slot in self.slots]
        self._parameter_addresses = [arena.parameters[slot.start :].ctypes.data for slot in self.slots]
        self.bucket_of = [_bucket_of(slot, arena) for slot in self.slots]
        self._per_bucket = np.bincount(self.bucket_of, minlength=len(arena.buckets)).tolist()
        self._missing = list(self._per_bucket)
        self._error: BaseException | None = None
        self._open = True
        for index, (_, p) in enumerate(named):
            p._register_backward_hook(self._hook(index))

    def fill_arena(self) -> None:
        """The parameters' values, as they are now, are the arena's."""
        for (_, p), slot in zip(self.named, self.slots, strict=True):
            self.arena.parameter(slot)[...] = p.numpy()

    def bind_parameters(self) -> None:
        """The arena's values are the parameters' from now on."""
        with paddle.no_grad():
            for (_, p), slot, address in zip(self.named, self.slots, self._parameter_addresses, strict=True):
                if p.data_ptr() != address:
                    _view(self.arena.parameters, slot)._share_buffer_to(p)

    def take_replaced_parameters(self) -> None:
        """Parameters that the program has put elsewhere come back, with their values."""
        for (_, p), slot, address in zip(self.named, self.slots, self._parameter_addresses, strict=True):
            if p.data_ptr() != address:
                self.arena.parameter(slot)[...] = p.numpy()
        self.bind_parameters()

    def begin(self, kept: Sequence[bool] | None = None) -> None:
        """Before a backward: it will accumulate into the arena, whoever has cleared or replaced gradients.

        Args:
            kept: to which parameters' gradients it adds; the others begin at zero. By default all do.
        """
        self.reached.clear()
        self._missing = list(self._per_bucket)
        if kept is None:
            self.arena.gradients.fill(0)
        for index, ((_, p), slot) in enumerate(zip(self.named, self.slots, strict=True)):
            adds = kept is not None and kept[index]
            if kept is not None and not adds:
                self.arena.gradients[slot.start : slot.stop] = 0
            if self.has_view(index):
                p._unset_fake_empty()  # set by clear_grad(): the next backward would replace the view
            else:
                if adds:
                    self.arena.gradient(slot)[...] = p.grad.numpy()
                self.attach(index)

    def has_view(self, index: int) -> bool:
        """Whether a parameter's gradient is its view of the arena."""
        grad = self.named[index][1].grad
        return grad is not None and grad.data_ptr() == self._gradient_addresses[index]

    def attach(self, index: int) -> None:
        """A parameter's gradient is a view of the arena; a new one, for clear_gradient(False) empties the very tensor
        that was attached."""
        _, p = self.named[index]
        p._copy_gradient_from(_view(self.arena.gradients, self.slots[index]))  # attaches, despite its name

    def raise_error(self) -> None:
        """Raise what a callback has raised in this backward."""
        if self._error:
            error, self._error = self._error, None
            raise error

    def complete_rest(self) -> None:
        """After a backward: buckets with a parameter that it did not reach are complete too.

        Raises:
            What `on_complete` has raised in it.
        """
        self.raise_error()
        for bucket, missing in enumerate(self._missing):
            if missing:
                self._on_complete(bucket)

    def stop(self) -> None:
        """Call back no more; Paddle cannot take a hook back."""
        self._open = False

    def close(self) -> None:
        """Give the model parameters and gradients of its own again, with the same values."""
        self.stop()
        with paddle.no_grad():
            for _, p in self.named:
                paddle.to_tensor(p.numpy())._share_buffer_to(p)
                p.clear_gradient(False)

    def _hook(self, index: int) -> Callable[[], None]:
        bound = ref(self)  # the parameter, which it has, keeps the hook where no garbage collector looks

        def accumulated() -> None:
            binding = bound()
            if binding is None or not binding._open:
                return
            try:
                binding._on_gradient(index)
            except BaseException as exc:  # raised inside a hook it would surface as an opaque SystemError
                binding._error = binding._error or exc

        return accumulated

    def _on_gradient(self, index: int) -> None:
        if not self.has_view(index):  # backward itself has replaced it
            self.arena.gradient(self.slots[index])[...] = self.named[index][1].grad.numpy()
            self.attach(index)
        if index in self.reached:
            self._on_again(index)
            return
        self.reached.add(index)
        bucket = self.bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self._on_complete(bucket)


def _view(flat: FloatArray, slot: Slot) -> Any:
    """A new Paddle tensor on a slot of a flat buffer, in its shape."""
    view = as_tensor(flat[slot.start : slot.stop].view(slot.dtype))
    view.get_tensor()._set_dims(list(slot.shape))
    return view


def _bucket_of(slot: Slot, arena: Arena) -> int:
    return next(i for i, b in enumerate(arena.buckets) if b.start <= slot.start < b.stop)
