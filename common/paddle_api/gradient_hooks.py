"""What Paddle calls when a backward has added a gradient: into the arena with it, and tell of complete buckets.

The built-in training and users' programs share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import numpy as np

from common.paddle_api.gradient_reads import grad_of
from common.tensors.arena import Arena, FloatArray, Slot
from common.tensors.flat_optimizer import as_tensor

__all__ = ["GradientHooks", "Named", "nothing_again", "view_of"]

Named = Sequence[tuple[str, Any]]  # parameters, by their names in the state_dict


def nothing_again(index: int) -> None:
    """For models of which a backward reaches every parameter once."""


class GradientHooks:
    """Gradients as views of an arena's slots of the same names, a hook on each parameter, and what a backward has
    reached of them.

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
        self.bucket_of = [_bucket_of(slot, arena) for slot in self.slots]
        self._per_bucket = np.bincount(self.bucket_of, minlength=len(arena.buckets)).tolist()
        self._missing = list(self._per_bucket)
        self._error: BaseException | None = None
        self._open = True
        for index, (_, p) in enumerate(named):
            p._register_backward_hook(self._hook(index))

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
            if p.stop_gradient:
                self._set_aside(index)
                continue
            adds = kept is not None and kept[index]
            if kept is not None and not adds:
                self.arena.gradients[slot.start : slot.stop] = 0
            if self.has_view(index):
                p._unset_fake_empty()  # set by clear_grad(): the next backward would replace the view
            else:
                if adds:
                    self.arena.gradient(slot)[...] = grad_of(p).numpy()
                self.attach(index)

    def _set_aside(self, index: int) -> None:
        """What a parameter that is frozen for a while has of a gradient is not the ranks' affair meanwhile."""
        if self.has_view(index):
            _, p = self.named[index]
            p._copy_gradient_from(as_tensor(self.arena.gradient(self.slots[index]).copy()))
        self.arena.gradients[self.slots[index].start : self.slots[index].stop] = 0

    def kept(self) -> list[bool]:
        """Which parameters have a gradient, perhaps zero."""
        return [(grad := grad_of(p)) is not None and grad.data_ptr() is not None for _, p in self.named]

    def has_view(self, index: int) -> bool:
        """Whether a parameter's gradient is its view of the arena."""
        grad = grad_of(self.named[index][1])
        return grad is not None and grad.data_ptr() == self._gradient_addresses[index]

    def attach(self, index: int) -> None:
        """A parameter's gradient is a view of the arena; a new one, for clear_gradient(False) empties the very tensor
        that was attached."""
        _, p = self.named[index]
        p._copy_gradient_from(view_of(self.arena.gradients, self.slots[index]))  # attaches, despite its name

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

    def _hook(self, index: int) -> Callable[[], None]:
        mine = ref(self)  # the parameter, which it has, keeps the hook where no garbage collector looks

        def accumulated() -> None:
            hooks = mine()
            if hooks is None or not hooks._open:
                return
            try:
                hooks._on_gradient(index)
            except BaseException as exc:  # raised inside a hook it would surface as an opaque SystemError
                hooks._error = hooks._error or exc

        return accumulated

    def _on_gradient(self, index: int) -> None:
        if not self.has_view(index):  # backward itself has replaced it
            self.arena.gradient(self.slots[index])[...] = grad_of(self.named[index][1]).numpy()
            self.attach(index)
        if index in self.reached:
            self._on_again(index)
            return
        self.reached.add(index)
        bucket = self.bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self._on_complete(bucket)


def view_of(flat: FloatArray, slot: Slot) -> Any:
    """A new Paddle tensor on a slot of a flat buffer, in its shape."""
    view = as_tensor(flat[slot.start : slot.stop].view(slot.dtype))
    view.get_tensor()._set_dims(list(slot.shape))
    return view


def _bucket_of(slot: Slot, arena: Arena) -> int:
    return next(i for i, b in enumerate(arena.buckets) if b.start <= slot.start < b.stop)
