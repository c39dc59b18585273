"""What of a user's model cannot be synchronised, said before anything is sent."""

from __future__ import annotations

import paddle

from common.errors import UsageError
from common.paddle_api.gradient_hooks import Named
from common.paddle_api.used_mask import DTYPES, dtype_of

__all__ = ["check_parameters", "refuse_static"]


def refuse_static(call: str) -> None:
    """
    Raises:
        UsageError: the program builds a static graph.
    """
    if not paddle.in_dynamic_mode():
        raise UsageError(
            f"{call}: the program builds a static graph, of which nothing is synchronised, so its ranks would train "
            "apart: leave out paddle.enable_static(), and train with paddle.DataParallel or fleet.distributed_model"
        )


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
