"""What of a user's model cannot be synchronised, said before anything is sent."""

from __future__ import annotations

from typing import Any

from paddle import nn

from common.errors import UsageError
from common.paddle_api.gradient_hooks import Named
from common.paddle_api.used_mask import DTYPES, dtype_of

__all__ = ["Frozen", "check_layers", "check_parameters"]


def check_parameters(named: Named) -> None:
    """
    Raises:
        UsageError: there are none, or one of another type.
    """
    if not named:
        raise UsageError("the model has no trainable parameter: nothing to synchronise")
    for name, p in named:
        if dtype_of(p) not in DTYPES:
            raise UsageError(
                f"parameter {name} is {dtype_of(p)}: only {' and '.join(DTYPES)} can be synchronised; keep "
                "parameters in float32 and compute in less with paddle.amp.auto_cast(level='O1')"
            )


def check_layers(model: Any) -> None:
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer, nn.Embedding) and layer._sparse:
            where = f"layer {name}" if name else "the model"
            raise UsageError(f"{where} is an Embedding with sparse gradients; make it with sparse=False")


class Frozen:
    """Which parameters of a model were trainable when it was wrapped; they must stay so, and no other become so."""

    def __init__(self, model: Any, named: Named) -> None:
        self._named = named
        self._frozen = [(name, p) for name, p in model.named_parameters() if p.stop_gradient]

    def check(self) -> None:
        """
        Raises:
            UsageError: the program has frozen or unfrozen a parameter.
        """
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
