"""A Paddle model's parameters as views of an arena, and its gradients (gradient_hooks.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from common.errors import UsageError
from common.paddle_api.gradient_hooks import GradientHooks, Named, nothing_again, view_of
from common.tensors.arena import Arena, Layout, sha256_of_parameters

__all__ = ["Binding", "digest_of_model", "is_trained", "layout_of", "statistics_of", "trainable"]

BATCH_NORMS = (nn.BatchNorm, nn.BatchNorm1D, nn.BatchNorm2D, nn.BatchNorm3D, nn.SyncBatchNorm)


def trainable(model: Any) -> list[tuple[str, Any]]:
    """(name, parameter) of all that is trained, in state_dict order; statistics are not."""
    statistics = statistics_of(model)
    wanted = {id(p) for p in model.parameters() if is_trained(p) and id(p) not in statistics}
    found: dict[int, tuple[str, Any]] = {}
    for name, p in model.state_dict().items():
        if id(p) in wanted:
            found.setdefault(id(p), (name, p))  # tied parameters have several names
    return list(found.values())


def is_trained(parameter: Any) -> bool:
    """Whether a backward may reach it. It does not reach what a forward pass has computed into a parameter, as a scale
    of quantisation, although that is part of the graph from then on."""
    return not parameter.stop_gradient and bool(parameter.is_leaf)


def statistics_of(model: Any) -> set[int]:
    """The `id` of what forward passes estimate. No gradient ever reaches it, also not after a program has set
    `trainable` of all that `parameters()` gives, as GANs do for each half of a step."""
    found: list[Any] = []
    for layer in model.sublayers(include_self=True):
        if isinstance(layer, BATCH_NORMS):
            found += layer._mean, layer._variance
        elif isinstance(layer, nn.SpectralNorm):
            found += layer.weight_u, layer.weight_v
    return {id(p) for p in found}


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


class Binding(GradientHooks):
    """Binds parameters, too, to the arena's slots of the same names: forward then reads `arena.parameters`, backward
    accumulates into `arena.gradients`, and nothing is ever packed.

    Args:
        others: as of GradientHooks.
    """

    def __init__(
        self,
        named: Named,
        arena: Arena,
        on_complete: Callable[[int], None],
        on_again: Callable[[int], None] = nothing_again,
    ) -> None:
        super().__init__(named, arena, on_complete, on_again)
        self._parameter_addresses = [arena.parameters[slot.start :].ctypes.data for slot in self.slots]

    def fill_arena(self) -> None:
        """The parameters' values, as they are now, are the arena's."""
        for (_, p), slot in zip(self.named, self.slots, strict=True):
            self.arena.parameter(slot)[...] = p.numpy()

    def bind_parameters(self) -> None:
        """The arena's values are the parameters' from now on."""
        with paddle.no_grad():
            for (_, p), slot, address in zip(self.named, self.slots, self._parameter_addresses, strict=True):
                if p.data_ptr() != address:
                    view_of(self.arena.parameters, slot)._share_buffer_to(p)

    def take_replaced_parameters(self) -> None:
        """Parameters that the program has put elsewhere come back, with their values."""
        for (_, p), slot, address in zip(self.named, self.slots, self._parameter_addresses, strict=True):
            if p.data_ptr() != address:
                self.arena.parameter(slot)[...] = p.numpy()
        self.bind_parameters()

    def close(self) -> None:
        """Give the model parameters and gradients of its own again, with the same values."""
        self.stop()
        with paddle.no_grad():
            for _, p in self.named:
                paddle.to_tensor(p.numpy())._share_buffer_to(p)
                p.clear_gradient(False)
