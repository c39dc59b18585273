"""`DataParallel`: a user's model whose gradients are, after backward, the mean over all ranks.

The user's optimizer then updates as it always did, whatever it is, so a wrapped program does what it did: gradient
clipping, schedulers, accumulation, AMP's scaler and resuming work on what Paddle itself holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

from common.arena import Arena, Layout, Slot
from common.backward import listen_to_backward
from common.buckets import plan_buckets
from common.errors import UsageError
from common.flat_optimizer import as_tensor
from common.model_arena import trainable
from common.synchronizer import Synchronizer

__all__ = ["DataParallel", "GradientAverage"]

USED = "(used)"  # the first slot of the arena: which parameters had a gradient, 1 or 0 for each


class GradientAverage:
    """Averages the gradients of a model's parameters at the end of every backward.

    The parameters' gradients are views of an arena while they exist. A view that was lost, because somebody cleared
    the gradient, is put back before backward; one that backward itself replaced is copied from and put back.
    """

    def __init__(self, model: Any, synchronizer: Synchronizer, *, first_bytes: int, bucket_bytes: int) -> None:
        self._named = trainable(model)
        self._check_dtypes()
        layout = Layout.of([(USED, [len(self._named)]), *((name, p.shape) for name, p in self._named)])
        starts = [slot.start for slot in layout.slots]
        buckets = plan_buckets(starts, layout.length, first_bytes=first_bytes, bucket_bytes=bucket_bytes)
        self._arena = Arena(layout, buckets=buckets, empty=synchronizer.empty)
        self._synchronizer = synchronizer
        self._slots = layout.slots[1:]
        self._addresses = [self._arena.gradients[slot.start :].ctypes.data for slot in self._slots]
        self._flat = as_tensor(self._arena.gradients)
        self._bucket_of = [
            next(i for i, b in enumerate(buckets) if s.start < b.stop and s.start >= b.start) for s in self._slots
        ]
        self._per_bucket = np.bincount(self._bucket_of, minlength=len(buckets)).tolist()
        self._has_gradient = [False] * len(self._named)
        self._error: BaseException | None = None
        self._fired: set[int] = set()
        self.enabled = True
        for index, (_, p) in enumerate(self._named):
            p._register_backward_hook(self._hook(index))

    def share_parameters(self) -> None:
        """Give every rank rank 0's parameters, and agree on the layout."""
        with paddle.no_grad():
            for (_, p), slot in zip(self._named, self._slots, strict=True):
                self._arena.parameter(slot)[...] = p.numpy()
            self._synchronizer.attach(self._arena, None)
            for (_, p), slot in zip(self._named, self._slots, strict=True):
                p.set_value(self._arena.parameter(slot))

    def before_backward(self) -> None:
        """Put lost views back; what was cleared is zero again."""
        self._fired.clear()
        self._waiting_for = list(self._per_bucket)
        self._check_unchanged()
        for index, ((_, p), slot) in enumerate(zip(self._named, self._slots, strict=True)):
            if p.grad is None or p.grad.data_ptr() is None:
                self._has_gradient[index] = False
                self._arena.gradients[slot.start : slot.stop] = 0
                self._attach(p, slot)
            elif p.grad.data_ptr() != self._addresses[index]:
                self._arena.gradients[slot.start : slot.stop] = p.grad.numpy().ravel()
                self._attach(p, slot)
            else:
                p._unset_fake_empty()  # after clear_grad() backward would otherwise replace the view

    def after_backward(self) -> None:
        """Wait until the gradients are the mean over ranks. A backward of some other model changes nothing."""
        if self._error:
            error, self._error = self._error, None
            raise error
        if self._fired and self.enabled:
            self._mark_used()
            self._synchronizer.finish(0.0)
        if self._fired or not self.enabled:
            self._detach_unused()
        else:
            self._detach_where(lambda index: not self._has_gradient[index])

    def _mark_used(self) -> None:
        """A parameter is used if backward reached it, or an earlier one did and its gradient was not cleared since."""
        used = self._arena.gradients[: len(self._named)]
        for index, slot in enumerate(self._slots):
            if index not in self._fired and self._has_gradient[index]:
                self._has_gradient[index] = bool(self._arena.gradients[slot.start : slot.stop].any())
            used[index] = self._has_gradient[index]

    def _detach_unused(self) -> None:
        """What no rank has used must not be updated: zero is a gradient, none is not."""
        if self.enabled:
            used = self._arena.gradients[: len(self._named)]
            self._has_gradient = [bool(value > 0) for value in used]
        self._detach_where(lambda index: not self._has_gradient[index])

    def _detach_where(self, condition: Any) -> None:
        for index, (_, p) in enumerate(self._named):
            if condition(index):
                p.clear_gradient(False)

    def _attach(self, p: Any, slot: Slot) -> None:
        view = self._flat._slice(slot.start, slot.stop)
        view.get_tensor()._set_dims(list(slot.shape))
        p._copy_gradient_from(view)  # attaches, despite its name

    def _hook(self, index: int) -> Any:
        def accumulated() -> None:
            try:
                self._on_gradient(index)
            except BaseException as exc:  # raised inside a hook it would surface as an opaque SystemError
                self._error = self._error or exc

        return accumulated

    def _on_gradient(self, index: int) -> None:
        _, p = self._named[index]
        if p.grad.data_ptr() != self._addresses[index]:
            slot = self._slots[index]
            self._arena.gradients[slot.start : slot.stop] = p.grad.numpy().ravel()
            self._attach(p, slot)
        self._has_gradient[index] = True
        if index in self._fired:
            return
        self._fired.add(index)
        bucket = self._bucket_of[index]
        self._waiting_for[bucket] -= 1
        holds_used = bucket == len(self._arena.buckets) - 1  # that one is final only when backward is done
        if self._waiting_for[bucket] == 0 and self.enabled and not holds_used:
            self._synchronizer.mark_final(bucket)

    def _check_dtypes(self) -> None:
        if not self._named:
            raise UsageError("the model has no trainable parameter: nothing to synchronise")
        for name, p in self._named:
            if p.dtype != paddle.float32:
                raise UsageError(f"parameter {name} is {p.dtype}: only float32 can be synchronised so far")

    def _check_unchanged(self) -> None:
        for name, p in self._named:
            if p.stop_gradient:
                raise UsageError(
                    f"parameter {name} was frozen after the model was wrapped; "
                    "freeze parameters before DataParallel, the same ones on all ranks"
                )


class DataParallel(nn.Layer):  # type: ignore[misc]
    """Paddle's `paddle.DataParallel` with the same signature, over whichever scheme it was imported from.

    Args:
        layers: the model. Its parameters and buffers become rank 0's.
        comm_buffer_size: size of a bucket, MB.
        last_comm_buffer_size: size of the first bucket to be ready, MB.
        find_unused_parameters: accepted; unused parameters are always found.
        strategy, group: accepted for compatibility; only the default group exists.
    """

    def __init__(
        self,
        layers: Any,
        strategy: Any = None,
        comm_buffer_size: float = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Any = None,
        *,
        synchronizer: Synchronizer,
    ) -> None:
        super().__init__(layers.full_name() + "_data_parallel")
        if group is not None:
            raise UsageError("DataParallel: sub-groups are not supported; leave out group=")
        self._layers = layers
        self.find_unused_parameters = find_unused_parameters
        self._average = GradientAverage(
            layers,
            synchronizer,
            first_bytes=int(last_comm_buffer_size * 1_000_000),
            bucket_bytes=int(comm_buffer_size * 1_000_000),
        )
        self._average.share_parameters()
        share_buffers(layers, synchronizer)
        listen_to_backward(self._average)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._layers(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates this rank's gradients only; the next one outside synchronises their sum."""
        before, self._average.enabled = self._average.enabled, False
        try:
            yield
        finally:
            self._average.enabled = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._layers.state_dict(*args, **kwargs)

    def set_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._layers.set_state_dict(*args, **kwargs)

    set_dict = load_dict = set_state_dict

    def scale_loss(self, loss: Any) -> Any:
        """Of Paddle 1.x; gradients are averaged without it."""
        return loss

    def apply_collective_grads(self) -> None:
        """Of Paddle 1.x; backward does it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layers = self.__dict__.get("_sub_layers", {}).get("_layers")
            if layers is None:
                raise
            return getattr(layers, name)


def share_buffers(model: Any, synchronizer: Synchronizer) -> None:
    """BatchNorm's statistics and other buffers become rank 0's, once; later each rank keeps its own, as in Paddle."""
    known = {id(p) for _, p in trainable(model)}
    with paddle.no_grad():
        for _, tensor in model.state_dict().items():
            if id(tensor) not in known:
                tensor.set_value(synchronizer.all_gather(tensor.numpy())[0])
