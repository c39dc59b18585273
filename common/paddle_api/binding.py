"""Makes a Paddle model's parameters and gradients views of an arena, and tells when a bucket is final."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import paddle

from common.errors import UsageError
from common.tensors.arena import Arena, Layout, Slot, sha256_of_parameters
from common.tensors.flat_optimizer import as_tensor

__all__ = ["ModelArena", "digest_of_model", "layout_of", "trainable"]


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


class ModelArena:
    """Binds `model` to `arena`: backward then accumulates into `arena.gradients`, forward reads
    `arena.parameters`, and nothing is ever packed.

    Args:
        on_final: called with a bucket's number, from the thread that runs backward, when the gradients of all its
            parameters are complete. What it raises is kept and raised by `after_backward`.
    """

    def __init__(self, model: Any, arena: Arena, on_final: Callable[[int], None]) -> None:
        self.arena = arena
        self._named = trainable(model)
        self._on_final = on_final
        self._flat_gradients = as_tensor(arena.gradients)
        self._gradient_addresses = [arena.gradients[slot.start :].ctypes.data for slot in arena.layout.slots]
        self._bucket_of = [_bucket_of(slot, arena) for slot in arena.layout.slots]
        self._per_bucket = np.bincount(self._bucket_of, minlength=len(arena.buckets)).tolist()
        self._error: BaseException | None = None
        self._bind_parameters()
        self._open = True
        for (_, p), bucket in zip(self._named, self._bucket_of, strict=True):
            p._register_backward_hook(self._hook(bucket))

    def before_backward(self) -> None:
        """Zero the gradients and make sure that backward will accumulate into the arena, whoever cleared them."""
        self.arena.gradients.fill(0)
        self._waiting_for = list(self._per_bucket)
        for (_, p), slot, address in zip(self._named, self.arena.layout.slots, self._gradient_addresses, strict=True):
            if p.grad is None or p.grad.data_ptr() != address:
                # A new view each time: clear_gradient(False) empties the very tensor that was attached.
                p._copy_gradient_from(_view(self._flat_gradients, slot))  # attaches, despite its name
            p._unset_fake_empty()  # set by clear_grad(): the next backward would replace the view

    def after_backward(self) -> None:
        """Mark what the hooks could not: buckets with a parameter that this step did not use."""
        if self._error:
            error, self._error = self._error, None
            raise error
        for bucket, missing in enumerate(self._waiting_for):
            if missing:
                self._on_final(bucket)

    def close(self) -> None:
        """Give the model parameters and gradients of its own again, with the same values."""
        self._open = False  # Paddle cannot take such a hook back
        with paddle.no_grad():
            for _, p in self._named:
                paddle.to_tensor(p.numpy())._share_buffer_to(p)
                p.clear_gradient(False)

    def _bind_parameters(self) -> None:
        """Values move into the arena; then the parameters are views of it."""
        flat = as_tensor(self.arena.parameters)
        with paddle.no_grad():
            for (_, p), slot in zip(self._named, self.arena.layout.slots, strict=True):
                self.arena.parameter(slot)[...] = p.numpy()
                _view(flat, slot)._share_buffer_to(p)

    def _hook(self, bucket: int) -> Callable[[], None]:
        bound = ref(self)  # the parameter, which it has, keeps the hook where no garbage collector looks

        def one_more() -> None:
            arena = bound()
            if arena is None or not arena._open:
                return
            arena._waiting_for[bucket] -= 1
            if arena._waiting_for[bucket] == 0:
                try:
                    arena._on_final(bucket)
                except BaseException as exc:  # raised inside a hook it would surface as an opaque SystemError
                    arena._error = exc

        return one_more


def _view(flat: Any, slot: Slot) -> Any:
    """The part of a flat Paddle tensor that a slot names, in its shape."""
    view = flat._slice(slot.start, slot.stop)
    view.get_tensor()._set_dims(list(slot.shape))
    return view


def _bucket_of(slot: Slot, arena: Arena) -> int:
    return next(i for i, b in enumerate(arena.buckets) if b.start <= slot.start < b.stop)
