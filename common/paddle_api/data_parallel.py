"""`DataParallel`: a user's model whose gradients are, after backward, the mean over all ranks.

The user's optimizer then updates as it always did, whatever it is, so a wrapped program does what it did: gradient
clipping, schedulers, accumulation, AMP's scaler and resuming work on what Paddle itself holds. Where parameter servers
can make the optimizer's update (server_updates.py), backward only pushes, and `optimizer.step()` waits.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

from common.errors import UsageError
from common.paddle_api.backward import forget, listen_to_backward
from common.paddle_api.binding import trainable
from common.paddle_api.replicas import replicas_agree
from common.paddle_api.server_updates import UpdateByServers, listen_to_steps
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Arena, FloatArray, Layout, Slot
from common.tensors.buckets import segments
from common.tensors.flat_optimizer import as_tensor

__all__ = ["DataParallel", "GradientAverage"]

DTYPES = ("float32", "float64")
COMPARED = (2, 10, 100, 1000)  # backwards in which ranks compare their parameters, where each makes the update
USED = "(used)"  # the first slot of the arena: which parameters had a gradient, 1 or 0 for each


class GradientAverage:
    """Averages the gradients of a model's parameters at the end of every backward.

    The parameters and their gradients are views of an arena. A gradient's view that was lost, because somebody cleared
    it, is put back before backward; one that backward itself replaced is copied from and put back.
    """

    def __init__(self, model: Any, synchronizer: Synchronizer, *, first_bytes: int, bucket_bytes: int) -> None:
        self._named = trainable(model)
        self._frozen = [(name, p) for name, p in model.named_parameters() if p.stop_gradient]
        self._check_parameters()
        check_layers(model)
        layout = layout_with_used(self._named)
        buckets = layout.plan(first_bytes=first_bytes, bucket_bytes=bucket_bytes)
        self._arena = Arena(layout, buckets=buckets, empty=synchronizer.empty)
        self._synchronizer = synchronizer
        by_name = {slot.name: slot for slot in layout.slots}
        self._slots = [by_name[name] for name, _ in self._named]
        self._gradient_addresses = [self._arena.gradients[slot.start :].ctypes.data for slot in self._slots]
        self._parameter_addresses = [self._arena.parameters[slot.start :].ctypes.data for slot in self._slots]
        self._bucket_of = [
            next(i for i, b in enumerate(buckets) if s.start < b.stop and s.start >= b.start) for s in self._slots
        ]
        self._per_bucket = np.bincount(self._bucket_of, minlength=len(buckets)).tolist()
        self._has_gradient = [False] * len(self._named)
        self._error: BaseException | None = None
        self._fired: set[int] = set()
        self._marked: set[int] = set()  # buckets that this backward has declared final
        self._early: set[int] = set()  # buckets that may be marked during backward; known after the first one
        self._twice: set[int] = set()  # buckets in which one backward reaches a parameter more than once
        self._servers_update = self._order_agreed = False
        self._averagings = 0  # backwards whose mean gradients this rank updates with by itself
        self._replicas_agree = True  # with those of other ranks, the last time that they were compared
        self._gradient_sum = self._parameter_sum = 0  # fingerprints, where servers may update
        self._pushed = self._averaged = False  # what has become of the last backward's gradients
        self.enabled = True
        self._stopped = False
        paddle_names = {slot.name: p.name for slot, (_, p) in zip(self._slots, self._named, strict=True)}
        self.parameter_names = [paddle_names.get(slot.name, "") for slot in layout.slots]
        self.slot_names = ["" if slot.name == USED else slot.name for slot in layout.slots]
        for index, (_, p) in enumerate(self._named):
            p._register_backward_hook(self._hook(index))

    def share_parameters(self) -> None:
        """Give every rank rank 0's parameters, and agree on the layout; from then on they are views of the arena."""
        with paddle.no_grad():
            for (_, p), slot in zip(self._named, self._slots, strict=True):
                self._arena.parameter(slot)[...] = p.numpy()
            self._synchronizer.attach(self._arena, None)
            for (_, p), slot in zip(self._named, self._slots, strict=True):
                view_of(self._arena.parameters, slot)._share_buffer_to(p)
        self.parameters_updated()

    def stop(self) -> None:
        """Backward is Paddle's own from now on."""
        self._stopped = True
        forget(self)

    # ---- around backward --------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Put lost views back; what was cleared is zero again."""
        self._began = time.monotonic()
        self._check_unchanged()
        kept = [p.grad is not None and p.grad.data_ptr() is not None for _, p in self._named]
        if self._pushed:  # an earlier backward since the last step: its average is what this one adds to
            self._take_average(kept)
        self._fired.clear()
        self._marked.clear()
        self._waiting_for = list(self._per_bucket)
        self._became_final: list[int] = []
        for index, ((_, p), slot) in enumerate(zip(self._named, self._slots, strict=True)):
            if not kept[index]:
                self._has_gradient[index] = False
                self._arena.gradients[slot.start : slot.stop] = 0
                self._attach(p, slot)
            elif p.grad.data_ptr() != self._gradient_addresses[index]:
                self._arena.gradient(slot)[...] = p.grad.numpy()
                self._attach(p, slot)
            else:
                p._unset_fake_empty()  # after clear_grad() backward would otherwise replace the view

    def _take_average(self, kept: list[bool]) -> None:
        """End the step that the last backward has pushed with the average, as if its backward had waited for it. What
        the program has cleared since stays zero; so does what only other ranks have used, if all else was cleared.

        Args:
            kept: which parameters have a gradient; brought up to date.
        """
        touched = fingerprint(self._arena.gradients) != self._gradient_sum
        mine = self._has_gradient
        cleared = [
            not k or (touched and not self._arena.gradients[slot.start : slot.stop].any())
            for k, slot in zip(kept, self._slots, strict=True)
        ]
        all_cleared = all(c for c, has in zip(cleared, mine, strict=True) if has)
        self._synchronizer.finish(0.0)
        self._pushed, self._averaged = False, True
        used = [value > 0 for value in self._used_slot().tolist()]
        for index, ((_, p), slot) in enumerate(zip(self._named, self._slots, strict=True)):
            if cleared[index] if mine[index] else all_cleared:
                self._arena.gradients[slot.start : slot.stop] = 0
            elif used[index] and not kept[index]:
                self._attach(p, slot)
                kept[index] = True
        self._has_gradient = used
        self._gradient_sum = fingerprint(self._arena.gradients)

    def after_backward(self) -> None:
        """Wait until the gradients are the mean over ranks. A backward of some other model changes nothing."""
        if self._error:
            error, self._error = self._error, None
            raise error
        if self._fired:
            self._early = set(range(self._last_bucket)) - self._twice
        if self._fired:
            self._synchronizer.trace.add("backward", self._began, time.monotonic())
        if self._fired and self.enabled:
            self._mark_used()
            if self._servers_update:
                self._push_rest()
            else:
                self._synchronizer.finish(0.0)
                self._agree_on_order()
                self._compare_replicas()
                self._has_gradient = [value > 0 for value in self._used_slot().tolist()]
        if self._fired and self._synchronizer.server_updates:
            self._averaged = self.enabled and not self._pushed
            self._gradient_sum = fingerprint(self._arena.gradients)
        # What no rank has used must not be updated: zero is a gradient, none is not.
        for index, (_, p) in enumerate(self._named):
            if not self._has_gradient[index]:
                p.clear_gradient(False)

    def _mark_used(self) -> None:
        """A parameter is used if backward reached it, or an earlier one did and its gradient was not cleared since."""
        for index, slot in enumerate(self._slots):
            if index not in self._fired and self._has_gradient[index]:
                self._has_gradient[index] = bool(self._arena.gradients[slot.start : slot.stop].any())
        self._used_slot()[...] = self._has_gradient

    def _agree_on_order(self) -> None:
        """After the first backward: buckets start in the order in which they became final on rank 0."""
        if not self._order_agreed:
            early = [bucket for bucket in self._became_final if bucket in self._early]
            rest = [bucket for bucket in range(len(self._arena.buckets)) if bucket not in early]
            everyones = self._synchronizer.all_gather(np.array([*early, *rest]))
            self._synchronizer.launch_in(everyones[0].tolist())
            self._order_agreed = True

    def _compare_replicas(self) -> None:
        """What the ranks have made of the same gradients so far; soon after the start, for that shows most mistakes."""
        self._averagings += 1
        if self._averagings in COMPARED and self._replicas_agree:
            parameters = (p.numpy() for _, p in self._named)  # which the model computes with
            when = f"in averaging backward {self._averagings:,}"
            self._replicas_agree = replicas_agree(parameters, self._synchronizer, when)

    def _used_slot(self) -> FloatArray:
        return self._arena.gradients[: len(self._named)]

    def _push_rest(self) -> None:
        for bucket in range(len(self._arena.buckets)):
            if bucket not in self._marked:
                self._synchronizer.mark_ready(bucket)
        self._pushed = True

    def _attach(self, p: Any, slot: Slot) -> None:
        p._copy_gradient_from(view_of(self._arena.gradients, slot))  # attaches, despite its name

    def _hook(self, index: int) -> Any:
        reference = weakref.ref(self)  # Paddle never gives a hook back

        def accumulated() -> None:
            mine = reference()
            if mine is None or mine._stopped:
                return
            try:
                mine._on_gradient(index)
            except BaseException as exc:  # raised inside a hook it would surface as an opaque SystemError
                mine._error = mine._error or exc

        return accumulated

    def _on_gradient(self, index: int) -> None:
        _, p = self._named[index]
        if p.grad.data_ptr() != self._gradient_addresses[index]:
            self._arena.gradient(self._slots[index])[...] = p.grad.numpy()
            self._attach(p, self._slots[index])
        self._has_gradient[index] = True
        bucket = self._bucket_of[index]
        if index in self._fired:
            self._reached_again(self._named[index][0], bucket)
            return
        self._fired.add(index)
        self._waiting_for[bucket] -= 1
        if self._waiting_for[bucket] == 0:
            self._became_final.append(bucket)
            if self.enabled and bucket in self._early:
                self._marked.add(bucket)
                self._synchronizer.mark_ready(bucket)

    def _reached_again(self, name: str, bucket: int) -> None:
        """Recomputation runs backwards within backward, each of which reaches the weights that it shares with others.
        The first backward shows where that is; such buckets wait for the end of backward."""
        self._twice.add(bucket)
        if bucket in self._marked:
            raise UsageError(
                f"backward reached parameter {name} again after its gradient was sent, as it did not before: "
                "use layers that are recomputed and share weights in the first backward too"
            )

    @property
    def _last_bucket(self) -> int:
        """The one that tells which parameters were used, final only when backward is done."""
        return len(self._arena.buckets) - 1

    # ---- for updates by servers -------------------------------------------------------------------------------------

    def gradients_changed(self) -> bool:
        lost = any(
            has and (p.grad is None or p.grad.data_ptr() != address)
            for has, (_, p), address in zip(self._has_gradient, self._named, self._gradient_addresses, strict=True)
        )
        return lost or fingerprint(self._arena.gradients) != self._gradient_sum

    def parameters_changed(self) -> bool:
        with paddle.no_grad():
            for (_, p), slot, address in zip(self._named, self._slots, self._parameter_addresses, strict=True):
                if p.data_ptr() != address:
                    self._arena.parameter(slot)[...] = p.numpy()
                    view_of(self._arena.parameters, slot)._share_buffer_to(p)
        return fingerprint(self._arena.parameters) != self._parameter_sum

    def parameters_updated(self) -> None:
        self._pushed = self._averaged = False
        if self._synchronizer.server_updates:
            self._parameter_sum = fingerprint(self._arena.parameters)

    def push(self) -> bool:
        if not (self._pushed or self._averaged):  # backward under no_sync, or a second step
            self._marked.clear()
            self._used_slot()[...] = self._has_gradient
            self._push_rest()
        return self._pushed

    def leave_to_servers(self) -> None:
        self._servers_update = True

    def used(self) -> bytes:
        has = dict(zip((slot.name for slot in self._slots), self._has_gradient, strict=True))
        return bytes(has.get(name, False) for name in self.slot_names)

    # ---- refusals ---------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        if not self._named:
            raise UsageError("the model has no trainable parameter: nothing to synchronise")
        for name, p in self._named:
            if dtype_of(p) not in DTYPES:
                raise UsageError(
                    f"parameter {name} is {dtype_of(p)}: only {' and '.join(DTYPES)} can be synchronised; keep "
                    "parameters in float32 and compute in less with paddle.amp.auto_cast(level='O1')"
                )

    def _check_unchanged(self) -> None:
        for name, p in self._named:
            if p.stop_gradient:
                raise UsageError(
                    f"parameter {name} was frozen after the model was wrapped; "
                    "freeze parameters before DataParallel, the same ones on all ranks"
                )
        for name, p in self._frozen:
            if not p.stop_gradient:
                raise UsageError(
                    f"parameter {name} was unfrozen after the model was wrapped, so its gradients would not be "
                    "averaged; have it trainable when DataParallel is made, and give it to the optimizer later"
                )


def check_layers(model: Any) -> None:
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer, nn.Embedding) and layer._sparse:
            where = f"layer {name}" if name else "the model"
            raise UsageError(f"{where} is an Embedding with sparse gradients; make it with sparse=False")


def layout_with_used(named: list[tuple[str, Any]]) -> Layout:
    """The used-mask, then the parameters, those of one dtype together."""
    by_dtype = {d: [(name, p.shape) for name, p in named if dtype_of(p) == d] for d in DTYPES}
    layout = Layout.of([(USED, [len(named)]), *by_dtype["float32"]])
    return layout.then(by_dtype["float64"], "float64")


def dtype_of(tensor: Any) -> str:
    """As NumPy calls it: "float32"."""
    return str(tensor.dtype).rpartition(".")[2]


def view_of(flat: FloatArray, slot: Slot) -> Any:
    """A new Paddle tensor on a slot of a flat buffer, in its shape."""
    view = as_tensor(flat[slot.start : slot.stop].view(slot.dtype))
    view.get_tensor()._set_dims(list(slot.shape))
    return view


FINGERPRINT = (16, 4096)  # rows and columns of 8 bytes that are looked at together: half a megabyte, which stays in L2


def fingerprint(array: FloatArray) -> int:
    """Sums over all bits, by which a change shows; 5 to 8 GB/s, where a digest would take 1.

    They are taken by rows and by columns, for one sum does not show values that have changed places.
    """
    rows, width = FINGERPRINT
    bits = array[: array.size // 2 * 2].view(np.uint64)
    grid = bits[: bits.size // width * width].reshape(-1, width)
    by_column = np.zeros(width, np.uint64)
    by_row: list[bytes] = []
    for start, stop in segments(0, len(grid), rows):
        by_column += np.add.reduce(grid[start:stop], axis=0)
        by_row.append(np.add.reduce(grid[start:stop], axis=1).tobytes())
    return hash((b"".join(by_row), by_column.tobytes(), bits[grid.size :].tobytes()))


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
        if synchronizer.server_updates:
            listen_to_steps(UpdateByServers(synchronizer, self._average))

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
                tensor.set_value(np.asarray(synchronizer.all_gather(tensor.numpy())[0]))  # as in Surface.all_reduce
