"""`DataParallel`: a user's model whose gradients are, after backward, the mean over all ranks.

The user's optimizer then updates as it always did, whatever it is, so a wrapped program does what it did: gradient
clipping, schedulers, accumulation, AMP's scaler and resuming work on what Paddle itself holds. Where parameter servers
can make the optimizer's update (optimizer_hook.py), backward only pushes, and `optimizer.step()` waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import nn

from common.errors import UsageError
from common.paddle_api.refusals import refuse_static
from common.paddle_api.wrapped_models import WrappedModel, WrappedModels

__all__ = ["DataParallel"]


class Reducer:
    """Stands in for Paddle's, which some programs prepare for a backward by themselves."""

    def __init__(self, wrapped: WrappedModel) -> None:
        self._wrapped = wrapped

    def prepare_for_backward(self, *_: Any) -> None:
        """The next backward synchronises; hooks find by themselves what it reaches."""
        self._wrapped.note_forward(synchronise=True)


class DataParallel(nn.Layer):  # type: ignore[misc]
    """Paddle's `paddle.DataParallel` with the same signature, over whichever scheme it was imported from.

    Args:
        layers: the model. Its parameters and buffers become rank 0's.
        comm_buffer_size: size of a bucket, MB.
        last_comm_buffer_size: size of the first bucket to be ready, MB.
        find_unused_parameters: accepted; unused parameters are always found.
        strategy: accepted for compatibility.
        group: whose members average the gradients; None: all ranks. Either way all ranks call it, in the same order,
            and begin with rank 0's parameters, as in Paddle.

    Raises:
        UsageError: something of the model cannot be synchronised, or this rank is no member of the group.
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
        models: WrappedModels,
    ) -> None:
        refuse_static("DataParallel")
        super().__init__(layers.full_name() + "_data_parallel")
        if group is not None and getattr(group, "process_group", None) is None:
            raise UsageError(
                "DataParallel: group= must be a group of two ranks or more with this rank among them, as new_group "
                f"makes them (got {group!r}); leave it out, or do not wrap the model on this rank"
            )
        carrier = None if group is None or group.nranks == models.nranks else group.process_group
        self.group = group
        self._layers = layers
        self.find_unused_parameters = find_unused_parameters
        self._wrapped = models.wrap(
            layers,
            first_bytes=int(last_comm_buffer_size * 1_000_000),
            bucket_bytes=int(comm_buffer_size * 1_000_000),
            among=carrier and carrier.synchronizer,
        )

    @property
    def grad_need_sync(self) -> bool:
        """Whether a forward has the next backward synchronise, as outside `no_sync`."""
        return self._wrapped.enabled

    @property
    def _reducer(self) -> Reducer:
        return Reducer(self._wrapped)

    def _find_tensor(self, _: Any) -> list[Any]:
        return []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        outputs = self._layers(*inputs, **kwargs)
        if paddle.is_grad_enabled():
            self._wrapped.note_forward(synchronise=self.grad_need_sync)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """The backward of a forward inside accumulates this rank's gradients only; the next one of a forward outside
        synchronises their sum."""
        before, self._wrapped.enabled = self._wrapped.enabled, False
        try:
            yield
        finally:
            self._wrapped.enabled = before

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
